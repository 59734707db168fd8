# SPDX-License-Identifier: Apache-2.0
"""numpy arrays as bytes and back."""

from __future__ import annotations

import numpy as np
import pytest

from ec_connector.arrays import array_of, bytes_of
from ec_connector.dtypes import DTypeError


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (np.array(3.5, np.float32), "float32"),
        (np.arange(6, dtype=np.uint8).reshape(2, 3).T, "uint8"),
        (np.arange(4, dtype=">f4"), ">f4"),
        (np.arange(4, dtype=np.complex128), "<c16"),
        (np.empty((3, 0), np.int64), "int64"),
    ],
)
def test_there_and_back(array: np.ndarray, name: str) -> None:
    """Type, byte order, shape and bytes."""
    found, raw = bytes_of(array)
    assert found == name
    assert raw.dtype == np.uint8
    again = array_of(raw, found, array.shape)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes()


def test_a_contiguous_array_is_not_copied() -> None:
    """Its bytes are looked at in place."""
    array = np.arange(4, dtype=np.int32)
    _, raw = bytes_of(array)
    assert np.shares_memory(array, raw)


@pytest.mark.parametrize(
    "array", [np.array([object()]), np.array(["text"]), np.zeros(2, [("a", "i4")])]
)
def test_what_is_no_plain_numbers(array: np.ndarray) -> None:
    """Objects, text and records are refused."""
    with pytest.raises(DTypeError):
        bytes_of(array)


def test_declared_type_of_another_byte_order() -> None:
    """Rows of bfloat16 are little-endian; nobody swaps them unseen."""
    with pytest.raises(DTypeError, match="big endian"):
        bytes_of(np.zeros(2, ">u2"), "bfloat16")


@pytest.mark.parametrize("name", ["<zz", "<f3", ">", "<O", "<U4", "nonsense", "", "<i4,<i4"])
def test_names_from_elsewhere(name: str) -> None:
    """Whatever a peer calls it: a DTypeError, never another exception and never objects."""
    with pytest.raises(DTypeError):
        array_of(np.zeros(16, np.uint8), name, [2])


@pytest.mark.parametrize("shape", [[5], [-1, 4], [2**62], [2**64, 0], [2, 2, 2]])
def test_shapes_from_elsewhere(shape: list[int]) -> None:
    """The bytes must be of that shape exactly; nothing is inferred."""
    for name in ("int32", "<i4"):
        with pytest.raises(DTypeError):
            array_of(np.zeros(16, np.uint8), name, shape)
