# SPDX-License-Identifier: Apache-2.0
"""Elements as planes of bytes, so that what is alike stands together.

Neighbouring rows have exponents alike and mantissas that look random. In memory they
alternate and nothing compresses. Here all first bytes come first, then all second ones,
most significant first; the sign of a float moves to the low end, so that the first plane
of bfloat16 is its exponent and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_WORDS: dict[int, type[np.unsignedinteger[Any]]] = {2: np.uint16, 4: np.uint32}


def split(raw: Bytes, itemsize: int, *, floats: bool) -> Bytes:
    """The bytes of ``raw`` (uint8, flat) in planes; as many. Those of no whole element stay last.

    An ``itemsize`` other than 2 and 4 leaves them as they are.
    """
    word = _WORDS.get(itemsize)
    if word is None:
        return raw
    whole = raw.nbytes - raw.nbytes % itemsize
    words = raw[:whole].view(word)
    if floats:
        words = (words << word(1)) | (words >> word(8 * itemsize - 1))
    planes = np.empty(raw.nbytes, np.uint8)
    for number, plane in enumerate(planes[:whole].reshape(itemsize, -1)):
        np.right_shift(words, word(8 * (itemsize - 1 - number)), out=plane, casting="unsafe")
    planes[whole:] = raw[whole:]
    return planes


def join(planes: Bytes, itemsize: int, *, floats: bool) -> Bytes:
    """The inverse of :func:`split`."""
    word = _WORDS.get(itemsize)
    if word is None:
        return planes
    whole = planes.nbytes - planes.nbytes % itemsize
    first, *others = planes[:whole].reshape(itemsize, -1)
    words = first.astype(word)
    for plane in others:
        words <<= word(8)
        words |= plane
    if floats:
        words = (words >> word(1)) | (words << word(8 * itemsize - 1))
    if whole == planes.nbytes:
        return words.view(np.uint8)
    return np.concatenate([words.view(np.uint8), planes[whole:]])
