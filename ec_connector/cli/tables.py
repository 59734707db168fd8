# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them in a terminal."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds, or milliseconds below one: ``0.42 ms``."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"


def share(part: float, whole: float) -> str:
    """``12 %``; nothing of nothing is 0 %."""
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
