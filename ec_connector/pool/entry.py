# SPDX-License-Identifier: Apache-2.0
"""What the pool holds (entries) and how full it is (usage)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from ec_connector.states import Table


class EntryState(enum.Enum):
    """What an entry's blocks are for, and whether ``get`` finds it."""

    SAVING = "saving"
    CONDEMNED = "saving, not findable"
    READY = "ready"
    PINNED = "ready, with pins"
    DROPPED = "with pins, not findable"
    FREE = "free"


ENTRY: Final = Table(
    "entry",
    EntryState.SAVING,
    {
        EntryState.SAVING: {
            "written": EntryState.READY,
            "condemned": EntryState.CONDEMNED,
            "abandoned": EntryState.FREE,
        },
        EntryState.CONDEMNED: {"written": EntryState.FREE, "abandoned": EntryState.FREE},
        EntryState.READY: {
            "pinned": EntryState.PINNED,
            "evicted": EntryState.FREE,
            "dropped": EntryState.FREE,
        },
        EntryState.PINNED: {
            "pinned": EntryState.PINNED,
            "unpinned": EntryState.PINNED,
            "last pin ended": EntryState.READY,
            "dropped": EntryState.DROPPED,
        },
        EntryState.DROPPED: {
            "unpinned": EntryState.DROPPED,
            "last pin ended": EntryState.FREE,
        },
    },
)


@dataclass(slots=True, eq=False)
class Entry:
    """One generation of one item and the blocks it holds.

    ``nbytes`` raw bytes of ``dtype`` (torch's name) and ``shape`` fill the
    ``extents`` (first block, count) in order. ``owner`` reserved it for its
    engine step ``step``. ``pins`` maps a session to when its pin ends (seconds;
    None: only by unpinning).
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

    @property
    def saving(self) -> bool:
        """Whether somebody may still write to its blocks."""
        return self.state in (EntryState.SAVING, EntryState.CONDEMNED)

    @property
    def ready(self) -> bool:
        """Whether its bytes are whole."""
        return self.state in (EntryState.READY, EntryState.PINNED, EntryState.DROPPED)

    @property
    def findable(self) -> bool:
        """Whether ``get`` returns it."""
        return self.state in (EntryState.SAVING, EntryState.READY, EntryState.PINNED)

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
