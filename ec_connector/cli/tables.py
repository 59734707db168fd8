# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them in a terminal."""

from __future__ import annotations

_SIZES = ("B", "kB", "MB", "GB", "TB")


def size(nbytes: float) -> str:
    """Bytes in steps of a thousand, as links are measured: ``4.7 MB``."""
    for unit in _SIZES:
        if abs(nbytes) < 1000 or unit == _SIZES[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Seconds, or milliseconds below one: ``0.42 ms``."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"


def share(part: float, whole: float) -> str:
    """``12 %``; nothing of nothing is 0 %."""
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
