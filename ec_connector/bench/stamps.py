# SPDX-License-Identifier: Apache-2.0
"""A few bytes at the start, in the middle and at the end that tell items apart.

Checking whole payloads would cost more than transferring them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

STAMP_BYTES = 16


def stamp_of(key: str) -> bytes:
    """The stamp of an item."""
    return hashlib.blake2b(key.encode(), digest_size=STAMP_BYTES).digest()


def positions(nbytes: int) -> tuple[int, int, int]:
    """Where the stamps lie in an item of at least ``STAMP_BYTES`` bytes."""
    return 0, (nbytes - STAMP_BYTES) // 2, nbytes - STAMP_BYTES


def stamp(array: np.ndarray[Any, np.dtype[np.uint8]], key: str) -> None:
    """Write the stamps of ``key`` into a flat array of bytes."""
    mark = np.frombuffer(stamp_of(key), np.uint8)
    for start in positions(len(array)):
        array[start : start + STAMP_BYTES] = mark


def is_stamped(views: Sequence[memoryview], key: str) -> bool:
    """Whether these pieces, in order, are the item ``key``."""
    nbytes = sum(map(len, views))
    mark = stamp_of(key)
    return all(_slice(views, start) == mark for start in positions(nbytes))


def _slice(views: Sequence[memoryview], start: int) -> bytes:
    found = b""
    for view in views:
        if start < len(view):
            found += bytes(view[start : start + STAMP_BYTES - len(found)])
        start = max(0, start - len(view))
        if len(found) == STAMP_BYTES:
            break
    return found
