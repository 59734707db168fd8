# SPDX-License-Identifier: Apache-2.0
"""When pins end by themselves: a heap of expiries with lazy deletion.

A renewal pushes another record and leaves the old one behind; the heap is
swept when stale records outnumber good ones, so it stays within twice the
number of pins that have an expiry.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

_SWEEP_FLOOR = 64  # not worth sweeping below this many records

Record = tuple[float, int, str]
"""(expiry in seconds, generation, session)"""


class Expiries:
    """Expiry times of pins. ``is_good(record)``: does that pin still end at that time?"""

    def __init__(self, is_good: Callable[[Record], bool]) -> None:
        self._is_good = is_good
        self._heap: list[Record] = []
        self._sweep_at = _SWEEP_FLOOR

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, record: Record) -> None:
        """Note that a pin ends at a time, whatever was noted for it before."""
        heapq.heappush(self._heap, record)
        if len(self._heap) > self._sweep_at:
            self._heap = list({record for record in self._heap if self._is_good(record)})
            heapq.heapify(self._heap)
            self._sweep_at = max(_SWEEP_FLOOR, 2 * len(self._heap))

    def next(self) -> float | None:
        """When the next pin ends, in seconds; None if none will."""
        while self._heap and not self._is_good(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Record | None:
        """Take the next pin whose time has come; None if there is none."""
        expiry = self.next()
        if expiry is None or expiry > now:
            return None
        return heapq.heappop(self._heap)
