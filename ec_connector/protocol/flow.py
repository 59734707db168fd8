# SPDX-License-Identifier: Apache-2.0
"""How much payload may be under way on one connection.

A window smaller than rate x round trip (the bandwidth-delay product) leaves the link idle
between credits. Neither is known beforehand, so the window is tried: while one passes in
less than two round trips it may be what holds the bytes up, and is doubled. Where the link
does, a window takes longer than that, and stays: one to four products.
"""

from __future__ import annotations

import math


class Flow:
    """The window of one connection, in bytes.

    Args:
        window: to begin with.
        most: never more.
    """

    def __init__(self, window: int, most: int) -> None:
        self.window = min(window, most)
        self._most = most
        self._round_trip = math.inf

    def answered(self, seconds: float) -> None:
        """A question was answered; the quickest answer is taken for a round trip."""
        self._round_trip = min(self._round_trip, seconds)

    def passed(self, window: int, seconds: float) -> int:
        """So many bytes, a whole window, arrived in so long. Returns the window from now on."""
        if math.isfinite(self._round_trip) and seconds < 2 * self._round_trip:
            self.window = min(max(self.window, 2 * window), self._most)
        return self.window
