# SPDX-License-Identifier: Apache-2.0
"""Sizes and durations as people write them: ``"4GiB"``, ``"512MB"``, ``"500ms"``."""

from __future__ import annotations

import math
import re
from fractions import Fraction

_BINARY = {f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_DECIMAL = {prefix: 1000**power for power, prefix in enumerate("kmgt", start=1)}
_SIZE_UNITS = {"": 1, **_BINARY, **_DECIMAL}
_SECONDS = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "": Fraction(1),
    "s": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
}
_TEXT = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(value: object) -> int:
    """Bytes from ``4096``, ``"64KiB"``, ``"1.5GiB"`` or ``"512MB"``.

    ``KiB MiB GiB TiB`` (or ``Ki Mi Gi Ti``) count in 1024s, ``KB MB GB TB`` (or
    ``K M G T``) in 1000s, as in Kubernetes; case does not matter.

    Raises:
        ValueError: not a size, negative, or not a whole number of bytes.
    """
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        unit = match[2].lower().removesuffix("b") if match else None
        if match is None or unit not in _SIZE_UNITS:
            raise ValueError('is not a size; write bytes, or text such as "64KiB", "512MB", "4GiB"')
        amount = Fraction(match[1]) * _SIZE_UNITS[unit]
    else:
        amount = _number(value, 'bytes, or text such as "64KiB", "512MB", "4GiB"')
    if amount.denominator != 1:
        raise ValueError("is not a whole number of bytes")
    return int(amount)


def parse_duration(value: object) -> float:
    """Seconds from ``2``, ``0.5``, ``"30s"``, ``"500ms"``, ``"2m"`` or ``"1h"``.

    Raises:
        ValueError: not a duration, or negative.
    """
    if not isinstance(value, str):
        return float(_number(value, 'seconds, or text such as "500ms", "30s", "2m"'))
    match = _TEXT.fullmatch(value)
    if match is None or match[2].lower() not in _SECONDS:
        raise ValueError(
            'is not a duration; write seconds, or text such as "500ms", "30s", "2m", "1h"'
        )
    return float(Fraction(match[1]) * _SECONDS[match[2].lower()])


def format_size(nbytes: int) -> str:
    """The shortest exact text that :func:`parse_size` reads back: ``"1GiB"``, ``"1500"``."""
    for unit, factor in reversed(_BINARY.items()):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit.capitalize()}B"
    return str(nbytes)


def format_duration(seconds: float) -> str:
    """Text that :func:`parse_duration` reads back: ``"10s"``, ``"500ms"``."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:.12g}ms"
    return f"{seconds:.12g}s"


def _number(value: object, expected: str) -> Fraction:
    # bool is an int in Python, but `true` is no amount.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"is {type(value).__name__}, not an amount; write {expected}")
    if not math.isfinite(value):
        raise ValueError(f"is not finite; write {expected}")
    if value < 0:
        raise ValueError(f"is negative; write {expected}")
    return Fraction(value)
