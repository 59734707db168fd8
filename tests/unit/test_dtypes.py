# SPDX-License-Identifier: Apache-2.0
"""Element types, their carriers, and the bytes of a shape."""

from __future__ import annotations

import numpy as np
import pytest

from ec_connector.dtypes import MAX_BYTES, DTypeError, lookup, nbytes_of, of_array
from ec_connector.errors import ECConnectorError

NATIVE = [
    "bool", "uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64",
    "int64", "float64",
]  # fmt: skip
CARRIED = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_types(name: str) -> None:
    """A type that numpy has is its own carrier and has numpy's width."""
    found = lookup(name)
    assert found.is_native
    assert found.itemsize == np.dtype(found.carrier).itemsize
    assert of_array(np.dtype(name)) == found


@pytest.mark.parametrize(("name", "carrier"), CARRIED.items())
def test_carried_types(name: str, carrier: str) -> None:
    """A type that numpy lacks rides in an unsigned integer of its width."""
    found = lookup(name)
    assert not found.is_native
    assert found.carrier == carrier
    assert found.itemsize == np.dtype(carrier).itemsize
    assert of_array(np.dtype(carrier), name) == found


def test_names_agree_with_torch() -> None:
    """Every name is a dtype of torch, and of the same width."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for name in [*NATIVE, *CARRIED]:
        assert lookup(str(getattr(torch, name))).itemsize == getattr(torch, name).itemsize


@pytest.mark.parametrize("name", ["", "torch.", "bf16", "complex64", "object", "float128", "BOOL"])
def test_unknown_names(name: str) -> None:
    """An unknown type is refused, and the message lists those that are known."""
    with pytest.raises(DTypeError, match=r"bfloat16.*float32"):
        lookup(name)


@pytest.mark.parametrize(
    ("array", "declared"),
    [("float32", "bfloat16"), ("int16", "bfloat16"), ("uint8", "bfloat16"), ("float32", "float16")],
)
def test_declared_type_must_fit(array: str, declared: str) -> None:
    """An array cannot be declared to hold a type that its elements do not carry."""
    with pytest.raises(DTypeError, match=rf"array of {array} cannot hold {declared}.*\.view"):
        of_array(np.dtype(array), declared)


@pytest.mark.parametrize("array_dtype", [">f4", "O", "U3", "datetime64[s]", "c8", "V2"])
def test_arrays_that_cannot_travel(array_dtype: str) -> None:
    """Big endian, objects, text, dates and complex numbers are refused, not reinterpreted."""
    with pytest.raises(DTypeError):
        of_array(np.dtype(array_dtype))


def test_error_is_ours_and_a_value_error() -> None:
    """Users can catch it with everything else of this package, or as the ValueError it is."""
    assert issubclass(DTypeError, ECConnectorError)
    assert issubclass(DTypeError, ValueError)


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [
        ((), "float32", 4),
        ((576, 4096), "bfloat16", 576 * 4096 * 2),
        ((0, 4096), "float32", 0),
        ((1 << 40, 1 << 40, 0), "float32", 0),
        ((7,), "float8_e5m2", 7),
        ([2, 3], "torch.float64", 48),
    ],
)
def test_bytes_of_a_shape(shape: tuple[int, ...], dtype: str, nbytes: int) -> None:
    """No axes are one element, an axis of 0 is none, widths are those of the type."""
    assert nbytes_of(shape, dtype) == nbytes


@pytest.mark.parametrize(
    ("shape", "part"),
    [((-1,), "-1"), ((3, -2, 0), "-2"), ((1,) * 9, "9 axes"), ((1 << 32, 1 << 32), "beyond")],
)
def test_impossible_shapes(shape: tuple[int, ...], part: str) -> None:
    """Negative sizes, too many axes and more bytes than any memory has are refused."""
    with pytest.raises(DTypeError, match=part):
        nbytes_of(shape, "float32")


def test_largest_size() -> None:
    """The limit itself is a size; one more is not."""
    assert nbytes_of((MAX_BYTES,), "uint8") == MAX_BYTES
    with pytest.raises(DTypeError):
        nbytes_of((MAX_BYTES + 1,), "uint8")
