# SPDX-License-Identifier: Apache-2.0
"""What two engines must agree on before encoder outputs may pass between them.

The compatibility hash is the in-tree one, over four factors. It cannot say
which of them differs and leaves out others that change the bytes, so factors by
name travel beside it. A factor that one side does not know is not compared,
except ``weights_version``: whoever says nothing of it runs the weights that it
was started with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ec_connector.errors import ConfigError
from ec_connector.protocol.messages import MAX_FACTOR_CHARS, MAX_FACTORS

WEIGHTS: Final = "weights"
WEIGHTS_VERSION: Final = "weights_version"
AS_LOADED: Final = "as loaded"


class Identity(msgspec.Struct, frozen=True):
    """Who an engine is to its peers: the hash, and the factors behind it by name."""

    compatibility_hash: str = ""
    factors: dict[str, str] = {}


def agree(mine: Identity, theirs: Identity) -> tuple[str, str, str] | None:
    """``(name, mine, theirs)`` of what both know and what differs, or None.

    Named factors come first: the hash can only say that something differs.
    """
    difference = first_difference(mine.factors, theirs.factors)
    hashes = (mine.compatibility_hash, theirs.compatibility_hash)
    if difference is None and all(hashes) and hashes[0] != hashes[1]:
        return ("compatibility_hash", *hashes)
    return difference


def compute_ec_compatibility_hash(
    vllm_version: str, model: str, dtype: str, block_size_bytes: int
) -> str:
    """SHA-256 (hex) of the compact JSON list of the four factors.

    ``dtype`` is written as torch prints it (``"torch.bfloat16"``);
    ``block_size_bytes`` is the bytes of one row.
    """
    factors = [vllm_version, model, dtype, block_size_bytes]
    return hashlib.sha256(json.dumps(factors, separators=(",", ":")).encode()).hexdigest()


def short_digest(value: object) -> str:
    """Text of at most ``MAX_FACTOR_CHARS`` that is equal for equal JSON values.

    A short value stays readable, a long one becomes ``"sha256:"`` and 32 hex
    digits. The order of a mapping's keys does not matter.

    Raises:
        TypeError: not a JSON value. Its ``str()`` might hold an address, which
            would never match on the other side.
    """
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    if len(text) <= MAX_FACTOR_CHARS:
        return text
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:32]


def usable_factors(factors: Mapping[Any, object]) -> dict[str, str]:
    """Factors as a request carries them, each value by :func:`short_digest`.

    Raises:
        ConfigError: too many, a name that is too long or no text, or a value that is not JSON.
    """
    if not isinstance(factors, Mapping):
        raise ConfigError(f"factors={factors!r:.80} are no mapping from names to values")
    if len(factors) > MAX_FACTORS:
        raise ConfigError(
            f"{len(factors)} factors are too many: a request carries {MAX_FACTORS}; "
            "put several into one value"
        )
    usable = {}
    for name, value in factors.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_FACTOR_CHARS:
            raise ConfigError(
                f"factor {name!r}: give it a name of 1 to {MAX_FACTOR_CHARS} characters"
            )
        try:
            usable[name] = short_digest(value)
            (name + usable[name]).encode()
        except (TypeError, ValueError) as error:  # not JSON; half a surrogate pair
            raise ConfigError(
                f"factor {name!r} has the value {value!r}, which cannot be sent: {error}"
            ) from error
    return usable


def first_difference(
    mine: Mapping[str, str], theirs: Mapping[str, str]
) -> tuple[str, str, str] | None:
    """``(name, mine, theirs)`` of a factor that both know and that differs, or None.

    The first by name, so that both sides name the same one.
    """
    versions = {WEIGHTS_VERSION: AS_LOADED}
    mine, theirs = versions | dict(mine), versions | dict(theirs)
    for name in sorted(mine.keys() & theirs.keys()):
        if mine[name] != theirs[name]:
            return name, mine[name], theirs[name]
    return None
