# SPDX-License-Identifier: Apache-2.0
"""Rows of floats as 8-bit numbers with one scale a row. **Lossy**: what arrives is near.

Packed: the scales (float32, one a row), then the numbers (int8), little-endian. An element
is off by at most half a 127th of its row's largest magnitude, and by the rounding of its own
type. A row of nothing but tiny numbers (1e-36) is zeros. Rows that hold an infinity, a NaN or
a number near float32's largest have no scale, and are not packed at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
_LEVELS = 127
_SCALE_BYTES = 4
_TINY = np.float32(1e-36)
"""127 times less is no normal number any more, and rounds badly."""
_HUGE = np.float32(3e38)


def packed_nbytes(nbytes: int, width: int, itemsize: int) -> int:
    """Bytes that ``nbytes`` of rows of ``width`` elements are packed in. ValueError: no rows."""
    row = width * itemsize
    if row < 1 or nbytes % row:
        raise ValueError(f"{nbytes} bytes are no whole rows of {row}")
    return nbytes // row * (_SCALE_BYTES + width)


def pack(raw: Bytes, dtype: str, width: int) -> Bytes | None:
    """Rows of ``width`` elements as scales and numbers; None where one is not finite."""
    rows = _floats(raw, dtype).reshape(-1, width)
    largest = np.abs(rows).max(axis=1)
    if not (largest < _HUGE).all():  # a NaN is not less than anything
        return None
    scales = np.where(largest < _TINY, np.float32(0), largest / np.float32(_LEVELS))
    divisors = np.where(scales > 0, scales, np.float32(1))
    numbers = np.clip(np.rint(rows / divisors[:, None]), -_LEVELS, _LEVELS).astype(np.int8)
    parts: list[Bytes] = [scales.astype("<f4").view(np.uint8), numbers.reshape(-1).view(np.uint8)]
    return np.concatenate(parts)


def unpack(packed: Bytes, dtype: str, width: int) -> Bytes:
    """The rows that :func:`pack` made, as bytes of ``dtype``.

    Raises:
        ValueError: not whole rows, or a scale that is no number.
    """
    row = _SCALE_BYTES + width
    if packed.nbytes % row:
        raise ValueError(f"{packed.nbytes} bytes are no whole packed rows of {row}")
    count = packed.nbytes // row
    scales = packed[: _SCALE_BYTES * count].view("<f4")
    if not (np.abs(scales) < _HUGE / _LEVELS).all():
        raise ValueError("a scale is no number, or too large")
    numbers = packed[_SCALE_BYTES * count :].view(np.int8).reshape(count, width)
    return _bytes(numbers.astype(np.float32) * scales.astype(np.float32)[:, None], dtype)


def _floats(raw: Bytes, dtype: str) -> Floats:
    if dtype == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)


def _bytes(rows: Floats, dtype: str) -> Bytes:
    if dtype == "bfloat16":
        bits = rows.view(np.uint32)
        # To the nearest, ties to even, as processors round.
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        kept = ((bits + half) >> np.uint32(16)).astype("<u2")
    else:
        with np.errstate(over="ignore"):  # a scale too large for float16 is the sender's
            kept = rows.astype("<f2" if dtype == "float16" else "<f4")
    return kept.reshape(-1).view(np.uint8)
