# SPDX-License-Identifier: Apache-2.0
"""A clock that stands still."""

from __future__ import annotations


class ManualClock:
    """Seconds since the test began, moved by the test alone."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move on. Raises ValueError for a step back."""
        if seconds < 0:
            raise ValueError(f"time does not go back ({seconds} s)")
        self.now += seconds
