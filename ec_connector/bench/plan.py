# SPDX-License-Identifier: Apache-2.0
"""How much is measured."""

from __future__ import annotations

import msgspec

ROW = 8192
"""Bytes of a row: 4096 columns of bfloat16, a usual width. Sizes are whole rows."""
SMALL, ONE, MAIN, LARGE, HUGE = (ROW * rows for rows in (16, 128, 576, 5760, 57600))
"""0.13, 1, 4.7, 47 and 472 MB."""
WORKING_SET = 128 * 1024 * 1024
"""Bytes that a subject goes round in: several times a processor's cache, and
the 16384 rows that the in-tree pair's figures are usually given for."""


class SizePlan(msgspec.Struct, frozen=True):
    """``count`` transfers of each subject, ``batch`` of them a turn."""

    nbytes: int
    count: int
    batch: int

    @property
    def slots(self) -> int:
        """Different items at the producer. The consumer holds one less, so each is fetched anew."""
        return max(3 if self.nbytes < HUGE else 2, WORKING_SET // self.nbytes)

    @property
    def uncounted(self) -> int:
        """Transfers at the start of a turn that only wake everybody up."""
        return 1 if self.nbytes < LARGE else 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        sizes: what is transferred.
        cap: seconds after which a slow subject gets no more turns at a size.
        first: producers that are new to a consumer, for the first fetch.
        crowd: numbers of consumers.
        crowd_items: items each of them fetches.
        crowd_depth: fetches under way at each, where the rate is the question.
        idle: seconds for which nothing happens.
        busy: seconds that the in-tree producer's step takes while it is asked.
        waiting, images: requests that wait, and images of each.
        steps: engine steps for each of those.
    """

    sizes: tuple[SizePlan, ...]
    cap: float
    first: int
    crowd: tuple[int, ...]
    crowd_items: int
    crowd_depth: int
    idle: float
    busy: float
    waiting: tuple[int, ...]
    images: tuple[int, ...]
    steps: int


FULL = Plan(
    sizes=(
        SizePlan(SMALL, 400, 20),
        SizePlan(ONE, 300, 10),
        SizePlan(MAIN, 300, 10),
        SizePlan(LARGE, 24, 4),
        SizePlan(HUGE, 4, 1),
    ),
    cap=30.0,
    first=8,
    crowd=(1, 8, 64),
    crowd_items=100,
    crowd_depth=4,
    idle=5.0,
    busy=5.0,
    waiting=(0, 10, 500),
    images=(1, 8, 32),
    steps=200,
)
QUICK = Plan(
    sizes=(SizePlan(SMALL, 60, 10), SizePlan(MAIN, 60, 10)),
    cap=5.0,
    first=3,
    crowd=(1, 8),
    crowd_items=50,
    crowd_depth=4,
    idle=2.0,
    busy=1.0,
    waiting=(0, 500),
    images=(1, 8),
    steps=50,
)
