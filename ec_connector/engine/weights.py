# SPDX-License-Identifier: Apache-2.0
"""Which weights an engine runs: those it was started with, or what was made of them since.

Pure. Weights change while an engine runs (``reload_weights``, weight transfer from a trainer,
a worker extension's own methods), and an encoding is right for those alone that made it. vLLM
passes every such change through one remote call to the workers, known by name only. A change
whose outcome is known from the disk or by a version that the operator gives can be compared
with peers; any other makes the engine differ from all of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ec_connector.protocol.fingerprint import (
    AS_LOADED,
    WEIGHTS,
    WEIGHTS_VERSION,
    Identity,
    short_digest,
)

_HARMLESS: Final = frozenset(
    {
        "compute_weight_checksums",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
    }
)
_RELOAD: Final = "reload_weights"


def may_change(method: object) -> bool:
    """Whether a call of the workers may change weights: all that speak of weights, or run anything.

    A call that only reads them cannot be told from one that writes by its name. To take it for
    a change costs transfers until both sides are given a version; the other error would cost
    the right answer.
    """
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    return name == "apply_model" or ("weight" in name.lower() and name not in _HARMLESS)


class Weights:
    """One engine's weights, as factors of its identity.

    Args:
        identity: what the engine is as it was started.
        digest: of the weights at a path or of a name, or with an empty string of those that the
            engine was started with; None where they cannot be read.
        changed: told what the engine is from now on, before vLLM goes on.
    """

    def __init__(
        self,
        identity: Identity,
        digest: Callable[[str], str | None],
        changed: Callable[[Identity], None],
    ) -> None:
        self._identity = identity
        self._digest = digest
        self._changed = changed
        self._source = ""

    def call_begins(self, method: object) -> None:
        """A call of the workers begins."""
        if may_change(method):
            self._become(None, f"changed {secrets.token_hex(8)}")

    def call_succeeded(
        self, method: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """It came back from all of them without an error."""
        if method != _RELOAD:
            return
        # reload_weights(weights_iterator, weights_path, is_checkpoint_format)
        given = dict(zip(("weights_iterator", "weights_path"), args, strict=False)) | dict(kwargs)
        if given.get("weights_iterator") is None:
            self._source = str(given.get("weights_path") or self._source)
            if digest := self._digest(self._source):
                self._become(digest, AS_LOADED)

    def versioned(self, version: str) -> None:
        """The operator says which version the weights are that the engine has now."""
        self._become(self._identity.factors.get(WEIGHTS), f"version {version}")

    def _become(self, digest: str | None, version: str) -> None:
        factors = {
            name: value
            for name, value in self._identity.factors.items()
            if name not in (WEIGHTS, WEIGHTS_VERSION)
        }
        factors |= {WEIGHTS: digest} if digest else {}
        factors |= {WEIGHTS_VERSION: short_digest(version)} if version != AS_LOADED else {}
        self._identity = Identity(self._identity.compatibility_hash, factors)
        self._changed(self._identity)
