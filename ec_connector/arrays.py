# SPDX-License-Identifier: Apache-2.0
"""numpy arrays to raw bytes and back, with nothing lost: dtype, byte order, shape, 0-d."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ec_connector.dtypes import MAX_RANK, DTypeError, lookup, nbytes_of, of_array

_KINDS = "biufc"  # bool, signed, unsigned, float, complex: bytes that mean the same anywhere


def bytes_of(array: np.ndarray[Any, Any], declared: str = "") -> tuple[str, np.ndarray[Any, Any]]:
    """The element type's name and the array's bytes in C order, shape ``[nbytes]``.

    The name is torch's where torch has the type, and else numpy's with the
    byte order (``">f4"``). The bytes are a view where the array is contiguous.

    Raises:
        DTypeError: objects, text, structures, masked values, more than ``MAX_RANK`` axes, or
            not what ``declared`` says.
    """
    if np.ma.is_masked(array):
        raise DTypeError("masked values have no bytes to carry; fill the array first")
    array = np.asarray(array)
    if array.ndim > MAX_RANK:
        raise DTypeError(f"an array of {array.ndim} axes exceeds the limit of {MAX_RANK}")
    if not isinstance(declared, str):
        raise DTypeError(f'dtype={declared!r:.80} is no name; give text such as "bfloat16"')
    swapped = array.dtype.byteorder == ">"
    try:
        name = of_array(array.dtype, declared).name
    except DTypeError:
        if declared or array.dtype.kind not in _KINDS or array.dtype.hasobject:
            raise
        name = array.dtype.str
    if swapped and declared:
        raise DTypeError(f"an array of {array.dtype.str} cannot hold {declared}: it is big endian")
    # reshape(-1) keeps a 0-d array's one element; it copies only what is not contiguous.
    return name, np.ascontiguousarray(array.reshape(-1)).view(np.uint8)


def array_of(raw: np.ndarray[Any, Any], name: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """The array whose bytes (``uint8``, shape ``[nbytes]``) and type ``bytes_of`` gave.

    Raises:
        DTypeError: an unknown type, or bytes that are not of this type and shape.
    """
    if name[:1] in "<>|=" and name:
        try:
            dtype = np.dtype(name)
        except TypeError as error:
            raise DTypeError(f"dtype {name!r} is none of numpy's") from error
        if dtype.kind not in _KINDS or dtype.hasobject:
            raise DTypeError(f"dtype {name!r} cannot be carried")
    else:
        nbytes_of(shape, name)
        dtype = np.dtype(lookup(name).carrier)
    if min(shape, default=0) < 0:  # numpy would find a size for it
        raise DTypeError(f"{list(shape)} is no shape")
    try:
        return raw.view(dtype).reshape(tuple(shape))
    except (OverflowError, ValueError) as error:
        text = f"{raw.nbytes} bytes are not {list(shape)} of {name}"
        raise DTypeError(text) from error
