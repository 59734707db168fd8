# SPDX-License-Identifier: Apache-2.0
"""Measuring by turns: whatever else the machine does hits all subjects alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Subject(Protocol):
    """Something whose transfers are timed."""

    name: str

    def turn(self, count: int, uncounted: int) -> list[float]:
        """Seconds of each of ``count`` transfers, after some that are not counted."""


def by_turns(
    subjects: Sequence[Subject],
    count: int,
    batch: int,
    cap: float,
    uncounted: int,
    tell: Callable[[str], None],
) -> dict[str, list[float]]:
    """Let every subject have turns of ``batch`` transfers until each has made ``count``.

    Another subject begins each round, so that nobody always follows the same
    neighbour. A subject that has spent ``cap`` seconds gets no more turns (it
    has had one at least). ``tell`` is called with a subject's name after its turn.
    """
    times: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    turn = 0
    while True:
        left = [
            subject
            for subject in subjects
            if len(times[subject.name]) < count and sum(times[subject.name]) < cap
        ]
        if not left:
            return times
        start = turn % len(left)
        for subject in left[start:] + left[:start]:
            taken = times[subject.name]
            taken += subject.turn(min(batch, count - len(taken)), uncounted)
            tell(subject.name)
        turn += 1
