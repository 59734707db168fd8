# SPDX-License-Identifier: Apache-2.0
"""Element types by torch's name (without ``torch.``), and what numpy calls their carrier.

numpy has no bfloat16 and no float8. Their bytes travel in an unsigned integer
of the same width, beside the name of what they are. Everything is little endian,
as on each machine that vLLM runs on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ec_connector.errors import ECConnectorError

if TYPE_CHECKING:
    import numpy as np

MAX_BYTES = (1 << 63) - 1
MAX_RANK = 8


class DTypeError(ECConnectorError, ValueError):
    """An element type or shape that cannot be carried; the text says which are."""


class DType(NamedTuple):
    """``carrier`` is the numpy dtype name that holds the bytes; ``itemsize`` in bytes."""

    name: str
    itemsize: int
    carrier: str

    @property
    def is_native(self) -> bool:
        """Whether numpy itself has this type."""
        return self.carrier == self.name


_NATIVE = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8, "float64": 8,
}  # fmt: skip
_CARRIED = {
    "bfloat16": (2, "uint16"),
    "float8_e4m3fn": (1, "uint8"),
    "float8_e4m3fnuz": (1, "uint8"),
    "float8_e5m2": (1, "uint8"),
    "float8_e5m2fnuz": (1, "uint8"),
    "float8_e8m0fnu": (1, "uint8"),
}
_BY_NAME = {name: DType(name, size, name) for name, size in _NATIVE.items()} | {
    name: DType(name, size, carrier) for name, (size, carrier) in _CARRIED.items()
}


def lookup(name: str) -> DType:
    """The type of that name; a leading ``torch.`` is allowed.

    Raises:
        DTypeError: not a type that can be carried.
    """
    found = _BY_NAME.get(name.removeprefix("torch."))
    if found is None:
        raise DTypeError(
            f"dtype {name!r:.80} cannot be carried; known: {', '.join(sorted(_BY_NAME))}"
        )
    return found


def of_array(array_dtype: np.dtype[Any], declared: str = "") -> DType:
    """The type of a numpy array's elements, or of what its carrier is ``declared`` to hold.

    ``declared`` ``"bfloat16"`` fits an array of ``uint16``; without it the
    array's own type is meant, also when an extension such as ml_dtypes gives
    numpy a ``bfloat16``.

    Raises:
        DTypeError: unknown, big endian, or declared as a type of another width.
    """
    order = array_dtype.byteorder
    if order == ">" or (order == "=" and sys.byteorder == "big"):
        raise DTypeError(
            f"dtype {array_dtype.str} is big endian; convert the array with "
            f".astype(array.dtype.newbyteorder('<')) first"
        )
    own = array_dtype.name
    if not declared:
        return lookup(own)
    found = lookup(declared)
    if own not in (found.name, found.carrier):
        raise DTypeError(
            f"an array of {own} cannot hold {found.name}; "
            f"pass its bytes as {found.carrier} with .view('{found.carrier}')"
        )
    return found


def nbytes_of(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a contiguous tensor; a shape of no axes is one element.

    Raises:
        DTypeError: unknown dtype, a negative size, more than ``MAX_RANK`` axes, or
            more than ``MAX_BYTES`` bytes.
    """
    total = lookup(dtype).itemsize
    if len(shape) > MAX_RANK:
        raise DTypeError(f"a shape of {len(shape)} axes exceeds the limit of {MAX_RANK}")
    for size in shape:
        if size < 0:
            raise DTypeError(f"shape {list(shape)} holds {size}, which is no size")
        total *= size
    # Compared after the loop: a later axis of 0 makes any product 0.
    if total > MAX_BYTES:
        raise DTypeError(f"shape {list(shape)} of {dtype} is {total} bytes, beyond any memory")
    return total
