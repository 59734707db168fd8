# SPDX-License-Identifier: Apache-2.0
"""Many deadlines, the soonest first, none of them looked at before it is due."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """A deadline per key, in seconds of the caller's clock.

    Cancelled and moved deadlines stay in the heap until they surface or until
    they outnumber the live ones, so memory stays proportional to live keys.
    """

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0  # breaks ties, so keys are never compared

    def __len__(self) -> int:
        return len(self._when)

    def set(self, key: K, when: float) -> None:
        """Give ``key`` the deadline ``when``, in place of any earlier one."""
        self._when[key] = when
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, key))
        if len(self._heap) > 64 + 2 * len(self._when):
            self._rebuild()

    def cancel(self, key: K) -> None:
        """Forget the deadline of ``key``, if it has one."""
        self._when.pop(key, None)

    def next(self) -> float | None:
        """The soonest deadline, or None."""
        while self._heap:
            when, _, key = self._heap[0]
            if self._when.get(key) == when:
                return when
            heapq.heappop(self._heap)
        return None

    def due(self, now: float) -> list[K]:
        """Keys whose deadline has come, soonest first; each is returned once."""
        keys = []
        while (when := self.next()) is not None and when <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._when[key]
            keys.append(key)
        return keys

    def _rebuild(self) -> None:
        self._heap = [(when, i, key) for i, (key, when) in enumerate(self._when.items())]
        self._serial = len(self._heap)
        heapq.heapify(self._heap)
