# SPDX-License-Identifier: Apache-2.0
"""What the pool holds (entries) and how full it is (usage)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class EntryState(enum.Enum):
    """What an entry's blocks are for."""

    SAVING = "saving"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Entry:
    """One generation of one item and the blocks it holds.

    ``nbytes`` raw bytes of ``dtype`` (torch's name) and ``shape`` fill the
    ``extents`` (first block, count) in order. ``owner`` reserved it for its
    engine step ``step``. ``pins`` maps a session to when its pin ends (seconds;
    None: only by unpinning). ``findable``: ``get`` returns it.
    """

    key: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    extents: list[tuple[int, int]]
    generation: int
    owner: bytes
    step: int
    state: EntryState = EntryState.SAVING
    pins: dict[str, float | None] = field(default_factory=dict)
    findable: bool = True

    @property
    def blocks(self) -> int:
        """How many blocks it holds."""
        return sum(count for _, count in self.extents)


@dataclass(slots=True, frozen=True)
class Usage:
    """The pool in blocks: ``free + saving + ready == num_blocks``.

    ``pinned`` is the part of ``ready`` that has pins; the rest can be evicted.
    ``entries`` counts entries that hold blocks, findable or not.
    """

    num_blocks: int
    free: int
    saving: int
    ready: int
    pinned: int
    entries: int
    largest_free_extent: int
