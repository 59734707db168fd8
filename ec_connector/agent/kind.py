# SPDX-License-Identifier: Apache-2.0
"""What the engines of one agent are: all the same, as they share its pool and its identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ec_connector.agent.packing import with_loss
from ec_connector.errors import ConfigError, WireError
from ec_connector.protocol.fingerprint import Identity, agree, usable_factors
from ec_connector.protocol.local import Hello


class Kind:
    """The identity that an agent shows its peers, put together from what its clients say.

    Args:
        identity: what is known at the start; may be empty.
        codecs: those of the agent; what they lose is a factor.

    Raises:
        ConfigError: the identity has no room for that factor, or contradicts it.
    """

    def __init__(self, identity: Identity, codecs: Sequence[str]) -> None:
        self._codecs = codecs
        self.identity = with_loss(identity, codecs)

    def objection(self, hello: Hello) -> str:
        """Why this client does not belong here; empty when it does, or says nothing of itself."""
        theirs = Identity(hello.compatibility_hash, hello.factors)
        if theirs == Identity() or (difference := agree(self.identity, theirs)) is None:
            return ""
        factor, mine, other = difference
        return f"{factor} differs: {mine!r} at the agent, {other!r} at the client"

    def join(self, hello: Hello) -> None:
        """Take over what this client knows and nobody said before.

        Raises:
            WireError: it contradicts what is known, or there is no room for it.
        """
        if objection := self.objection(hello):
            raise WireError(objection)
        self._set(
            self.identity.compatibility_hash or hello.compatibility_hash,
            self.identity.factors | hello.factors,
        )

    def become(self, factors: Mapping[str, str]) -> None:
        """The weights of a client changed: these factors in place of all that were known.

        Raises:
            WireError: there is no room for them.
        """
        self._set(self.identity.compatibility_hash, factors)

    def _set(self, compatibility_hash: str, factors: Mapping[str, str]) -> None:
        try:
            self.identity = with_loss(
                Identity(compatibility_hash, usable_factors(factors)), self._codecs
            )
        except ConfigError as error:
            raise WireError(f"the factors of the agent's clients together: {error}") from error
