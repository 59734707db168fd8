# SPDX-License-Identifier: Apache-2.0
"""What lies between two state machines, with every fault that a network has, on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Parcel(Generic[T]):
    content: T
    due: float


class Channel(Generic[T]):
    """One direction: what is sent comes out in order, unless the test meddles.

    ``delay`` (seconds) holds for what is sent from then on. Positions count from
    the parcel that is next.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._parcels: list[_Parcel[T]] = []
        self.delay = 0.0
        self.held = False
        """While True nothing comes out."""

    def __len__(self) -> int:
        return len(self._parcels)

    @property
    def pending(self) -> list[T]:
        """What is on its way, the next one first."""
        return [parcel.content for parcel in self._parcels]

    def send(self, content: T) -> None:
        """Put something on its way."""
        self._parcels.append(_Parcel(content, self._clock() + self.delay))

    def take(self) -> T | None:
        """What arrives now; None when nothing does."""
        due = self.next_due()
        if due is None or due > self._clock():
            return None
        return self._parcels.pop(0).content

    def next_due(self) -> float | None:
        """When :meth:`take` has something next; None when nothing is to come."""
        return self._parcels[0].due if self._parcels and not self.held else None

    def drop(self, position: int = 0) -> T:
        """Lose a parcel; returns it. Raises IndexError if there is none."""
        return self._parcels.pop(position).content

    def duplicate(self, position: int = 0) -> None:
        """Let a parcel arrive twice in a row. Raises IndexError if there is none."""
        parcel = self._parcels[position]
        self._parcels.insert(position, _Parcel(parcel.content, parcel.due))

    def reorder(self, position: int, to: int = 0) -> None:
        """Let a parcel overtake others, or fall behind. Raises IndexError if there is none."""
        self._parcels.insert(to, self._parcels.pop(position))

    def lose_all(self) -> None:
        """Lose everything that is on its way."""
        self._parcels.clear()


class Transport(Generic[T]):
    """Both directions between a consumer and a producer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.to_producer: Channel[T] = Channel(clock)
        self.to_consumer: Channel[T] = Channel(clock)

    def next_due(self) -> float | None:
        """When something arrives next, at either end; None when nothing is to come."""
        dues = (self.to_producer.next_due(), self.to_consumer.next_due())
        return min((due for due in dues if due is not None), default=None)

    def lose_all(self) -> None:
        """Lose everything that is on its way, as a broken connection does."""
        self.to_producer.lose_all()
        self.to_consumer.lose_all()
