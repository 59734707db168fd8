# SPDX-License-Identifier: Apache-2.0
"""Names of the codecs, and which of them two sides use for an item."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Final

from ec_connector.dtypes import DTypeError, lookup
from ec_connector.errors import ConfigError

NONE: Final = "none"
ZSTD: Final = "zstd"
LZ4: Final = "lz4"
LOSSY: Final = "lossy-int8-rows"
KNOWN_CODECS: Final = (NONE, ZSTD, LZ4, LOSSY)

LOSS: Final = "loss"
"""Name of the fingerprint's factor. A side that does not send it loses nothing."""
EXACT: Final = "none"

_FLOATS = ("bfloat16", "float16", "float32")
_MODULES = {ZSTD: "zstandard", LZ4: "lz4"}


def check_codecs(codecs: Sequence[str]) -> None:
    """Raise ConfigError for a list that names no codec, an unknown one, or one twice."""
    for name in codecs:
        if name not in KNOWN_CODECS:
            raise ConfigError(
                f"codecs={list(codecs)} names {name!r}, which is unknown; "
                f"use any of {', '.join(KNOWN_CODECS)}"
            )
    if not codecs or len(set(codecs)) != len(codecs):
        raise ConfigError(
            f"codecs={list(codecs)} must name one or more ways, each once; "
            f"use any of {', '.join(KNOWN_CODECS)}"
        )


def lacking(codecs: Sequence[str]) -> dict[str, str]:
    """The codecs of the list whose library is not installed here, and what to install."""
    return {
        name: f"pip install 'ec-connector[{_MODULES[name]}]'"
        for name in codecs
        if name in _MODULES and importlib.util.find_spec(_MODULES[name]) is None
    }


def usable_codecs(codecs: Sequence[str]) -> tuple[str, ...]:
    """The codecs of the list that work here.

    Raises:
        ConfigError: none of them does.
    """
    missing = lacking(codecs)
    usable = tuple(name for name in codecs if name not in missing)
    if not usable:
        raise ConfigError(
            f"codecs={list(codecs)}: no library for any of them is installed; "
            f"{' or '.join(missing.values())}, or add 'none'"
        )
    return usable


def loss_of(codecs: Sequence[str]) -> str:
    """What rows may lose on their way with these codecs: the value of the factor ``loss``."""
    return LOSSY if LOSSY in codecs else EXACT


def row_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of one row, the last axis. 0 where rows cannot be scaled: no floats, or no axis."""
    name = dtype.removeprefix("torch.")
    if name not in _FLOATS or not shape:
        return 0
    return shape[-1] * lookup(name).itemsize


def suits(codec: str, dtype: str, shape: Sequence[int], chunk_bytes: int) -> bool:
    """Whether a codec can carry an item in messages of at most ``chunk_bytes``."""
    return codec != LOSSY or 0 < row_bytes(dtype, shape) <= chunk_bytes


def choose(
    offered: Sequence[str],
    allowed: Sequence[str],
    dtype: str,
    shape: Sequence[int],
    chunk_bytes: int,
) -> str | None:
    """The first codec offered that is allowed and suits the item; None: there is none.

    A peer that offers nothing knows no codecs, which is the same as offering ``none``.
    """
    for name in offered or (NONE,):
        if name in allowed and suits(name, dtype, shape, chunk_bytes):
            return name
    return None


def aligned_chunk(codec: str, dtype: str, shape: Sequence[int], chunk_bytes: int) -> int:
    """``chunk_bytes``, or fewer so that each message holds whole rows (whole elements)."""
    unit = row_bytes(dtype, shape) if codec == LOSSY else item_bytes(dtype)
    return chunk_bytes - chunk_bytes % unit if unit else chunk_bytes


def item_bytes(dtype: str) -> int:
    """Bytes of one element; 1 where the type is not known."""
    try:
        return lookup(dtype).itemsize
    except DTypeError:
        return 1


def is_float(dtype: str) -> bool:
    """Whether elements are sign, exponent and mantissa, in two or four bytes."""
    return dtype.removeprefix("torch.") in _FLOATS
