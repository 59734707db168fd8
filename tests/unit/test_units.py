# SPDX-License-Identifier: Apache-2.0
"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_connector.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (4096, 4096),
        (0, 0),
        (1e9, 1_000_000_000),
        ("4096", 4096),
        ("12B", 12),
        ("64KiB", 65536),
        ("64 KiB", 65536),
        ("64kib", 65536),
        ("64Ki", 65536),
        ("512MB", 512_000_000),
        ("512M", 512_000_000),
        ("1.5GiB", 3 << 29),
        (" 2TiB ", 2 << 40),
    ],
)
def test_sizes(written: object, nbytes: int) -> None:
    """Binary and decimal units, fractions, spaces and any case are read exactly."""
    assert parse_size(written) == nbytes


@pytest.mark.parametrize(
    "written",
    [
        True, None, [], {}, b"1KiB", "", "GiB", "-1GiB", "1GiBs", "1PiB", "1e9", "0x10", "1,5GiB",
        "٣GiB", "1 2GiB", -1, float("nan"), float("inf"), 0.5, "0.1KiB", "1" * 400,
    ],
)  # fmt: skip
def test_not_sizes(written: object) -> None:
    """Whatever is not a whole, finite, positive amount of bytes is refused with ValueError."""
    with pytest.raises(ValueError, match="is "):
        parse_size(written)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (2, 2.0), (0.25, 0.25), ("30s", 30.0), ("500ms", 0.5), ("250us", 0.00025), ("2m", 120.0),
        ("2min", 120.0), ("1.5h", 5400.0), ("10", 10.0), ("10 S", 10.0),
    ],
)  # fmt: skip
def test_durations(written: object, seconds: float) -> None:
    """Every unit is read, and a bare number counts seconds."""
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written", [True, None, "", "s", "-1s", "1d", "soon", -0.1, float("nan"), float("inf"), [1]]
)
def test_not_durations(written: object) -> None:
    """Whatever is not a finite, positive time is refused with ValueError."""
    with pytest.raises(ValueError, match="is "):
        parse_duration(written)


@pytest.mark.property
@given(st.integers(0, 1 << 50))
def test_size_text_is_read_back(nbytes: int) -> None:
    """What is printed for a size can be put into the configuration."""
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.property
@given(st.integers(0, 10_000_000))
def test_duration_text_is_read_back(milliseconds: int) -> None:
    """What is printed for a duration can be put into the configuration."""
    assert parse_duration(format_duration(milliseconds / 1000)) == milliseconds / 1000


def test_text_is_short() -> None:
    """The largest unit that is exact is chosen."""
    assert format_size(1 << 30) == "1GiB"
    assert format_size(3 << 29) == "1536MiB"
    assert format_size(1500) == "1500"
    assert format_duration(10.0) == "10s"
    assert format_duration(0.5) == "500ms"
