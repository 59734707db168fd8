# SPDX-License-Identifier: Apache-2.0
"""Who holds which blocks of the pool: reservations, items, pins, eviction.

The life of an entry, which holds its blocks until it is FREE, is the table ``ENTRY``.

Rules:

1. Blocks are handed out again only when nobody may still write to them (the
   writer of an entry that is being saved) or read from them (a pin).
2. A key names at most one findable entry. Older generations of that key may
   still hold blocks, each until its writer or its last reader is gone.
3. Only READY entries without pins are evicted, least recently used first, and
   none at all when that could not make enough room.

Pure bookkeeping: no memory is touched and no clock is read; ``now`` is any
clock that counts seconds. Each call costs the same at any number of entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from ec_connector.errors import InternalError, ItemTooLargeError, PoolFullError
from ec_connector.pool.audit import Books, audit
from ec_connector.pool.entry import ENTRY, Entry, EntryState, Usage
from ec_connector.pool.extents import FreeExtents
from ec_connector.pool.pins import Expiries, Record
from ec_connector.pool.story import Stories

__all__ = ["FEW_PIECES", "BlockPool", "Entry", "EntryState", "Usage"]

FEW_PIECES = 16
"""An item in more pieces than this is worth evicting a little more for: see ``reserve``."""
_LOOK_AHEAD = 8  # so many of the least recently used are looked at for one that leaves one run
_MORE_EVICTIONS = 8  # so many entries at most go for the sake of fewer pieces


class BlockPool:
    """Bookkeeping of ``num_blocks`` blocks of ``block_bytes`` bytes each."""

    on_free: Callable[[Entry], None] | None
    """Called with an entry when its blocks become free, before they can be handed out again."""
    on_ready: Callable[[Entry], None] | None
    """Called with an entry when it becomes READY."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        if num_blocks < 1 or block_bytes < 1:
            raise InternalError(f"a pool of {num_blocks} blocks of {block_bytes} bytes")
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.on_free = None
        self.on_ready = None
        self._free = FreeExtents(num_blocks)
        self._found: dict[str, Entry] = {}
        self._held: dict[int, Entry] = {}  # by generation: every entry that holds blocks
        self._evictable: OrderedDict[int, Entry] = OrderedDict()  # least recently used first
        self._saving: dict[bytes, dict[int, dict[int, Entry]]] = {}  # owner, step, generation
        self._pinned: dict[str, dict[int, Entry]] = {}  # session, generation
        self._expiries = Expiries(self._pin_ends_at)
        self._saving_blocks = 0
        self._pinned_blocks = 0
        self._evictable_blocks = 0
        self._last_generation = 0
        self._now = 0.0
        self._stories = Stories()

    # ── saving ───────────────────────────────────────────────────────────────

    def reserve(
        self,
        key: str,
        nbytes: int,
        dtype: str,
        shape: tuple[int, ...],
        *,
        owner: bytes,
        step: int,
        now: float,
    ) -> Entry:
        """Hold blocks for an item that ``owner`` will write for its engine step ``step``.

        One run of blocks if there is one, else several. Evicts as much as is
        needed; where the item would lie in more than ``FEW_PIECES`` pieces,
        a few entries more, never more than the item's own size.

        Raises:
            ItemTooLargeError: larger than the whole pool.
            PoolFullError: does not fit beside what is pinned or being saved;
                nothing was evicted.
            InternalError: ``key`` is held already, or ``nbytes`` is negative.
        """
        self._now = now
        if key in self._found:
            raise InternalError(f"reserve: {key!r} is held already\n{self._told(key)}")
        if nbytes < 0:
            raise InternalError(f"reserve: {key!r} of {nbytes} bytes")
        # One block at least: the first block's generation stands for the item.
        need = max(1, -(-nbytes // self.block_bytes))
        if need > self.num_blocks:
            raise ItemTooLargeError(
                f"{key!r} of {nbytes} bytes needs {need} blocks of {self.block_bytes} bytes, "
                f"the whole pool has {self.num_blocks}"
            )
        if need > self._free.total + self._evictable_blocks:
            raise PoolFullError(
                f"{key!r} of {nbytes} bytes needs {need} blocks of {self.block_bytes} bytes: "
                f"of {self.num_blocks} there are {self._free.total} free, "
                f"{self._evictable_blocks} evictable, {self._pinned_blocks} pinned "
                f"and {self._saving_blocks} being saved"
            )
        extents = self._find_room(need)
        self._last_generation += 1
        entry = Entry(key, nbytes, dtype, shape, extents, self._last_generation, owner, step)
        self._found[key] = entry
        self._held[entry.generation] = entry
        of_step = self._saving.setdefault(owner, {}).setdefault(step, {})
        of_step[entry.generation] = entry
        self._saving_blocks += need
        self._stories.add(key, now, entry.generation, "reserved")
        return entry

    def commit(self, key: str, generation: int, now: float) -> Entry | None:
        """The item is written: SAVING becomes READY, evictable until pinned.

        None if that generation of ``key`` is not being saved; if it was
        condemned, its blocks are free now.
        """
        self._now = now
        entry = self._being_saved(key, generation)
        if entry is None:
            return None
        self._end_saving(entry)
        if entry.state is EntryState.CONDEMNED:
            self._release(entry, "written")
            return None
        self._move(entry, "written")
        self._make_evictable(entry)
        if self.on_ready is not None:
            self.on_ready(entry)
        return entry

    def abandon(self, key: str, generation: int) -> bool:
        """That reservation will not be written (any more): free it. False if there is none."""
        entry = self._being_saved(key, generation)
        if entry is None:
            return False
        self._end_saving(entry)
        self._release(entry, "abandoned")
        return True

    def condemn(self, key: str, generation: int) -> bool:
        """Hide a reservation whose writer may still be writing.

        Its blocks stay out of use until that generation is committed or
        abandoned; ``key`` can be reserved again at once. False if there is no
        such findable reservation.
        """
        entry = self._being_saved(key, generation)
        if entry is None or not entry.findable:
            return False
        self._hide(entry, "condemned")
        return True

    def abandon_steps(self, owner: bytes, step: int) -> list[Entry]:
        """Free what ``owner`` reserved for steps up to ``step`` and did not commit."""
        steps = self._saving.get(owner, {})
        return self._abandon_all([steps[one] for one in steps if one <= step], "step over")

    def abandon_owner(self, owner: bytes) -> list[Entry]:
        """Free everything that ``owner`` reserved and did not commit: it is gone."""
        return self._abandon_all(list(self._saving.get(owner, {}).values()), "owner gone")

    # ── reading ──────────────────────────────────────────────────────────────

    def get(self, key: str) -> Entry | None:
        """The findable entry of a key, SAVING or READY."""
        return self._found.get(key)

    def touch(self, key: str, now: float) -> None:
        """Count as used: it is evicted after all that were used before. No-op if not held."""
        self._now = now
        entry = self._found.get(key)
        if entry is not None and entry.generation in self._evictable:
            self._evictable.move_to_end(entry.generation)

    def pin(self, key: str, session: str, expiry: float | None, now: float) -> Entry:
        """Keep a READY item in place for ``session`` until ``expiry`` (None: until unpinned).

        A second pin of the same session only sets the expiry anew. Raises
        InternalError if the key is not held or not READY.
        """
        self._now = now
        entry = self._found.get(key)
        if entry is None:
            raise InternalError(f"pin: {key!r} is not held\n{self._told(key)}")
        if session not in entry.pins:
            before = entry.state
            self._move(entry, "pinned", session)
            if before is EntryState.READY:
                del self._evictable[entry.generation]
                blocks = entry.blocks
                self._evictable_blocks -= blocks
                self._pinned_blocks += blocks
            self._pinned.setdefault(session, {})[entry.generation] = entry
        elif entry.pins[session] == expiry:
            return entry
        entry.pins[session] = expiry
        if expiry is not None:
            self._expiries.add((expiry, entry.generation, session))
        return entry

    def unpin(self, key_generation: int, session: str, now: float) -> bool:
        """End one pin, named by the entry's generation. False if there is none.

        With the last pin a dropped entry's blocks become free; any other
        becomes evictable, as the most recently used.
        """
        self._now = now
        entry = self._held.get(key_generation)
        if entry is None or session not in entry.pins:
            return False
        self._end_pin(entry, session)
        return True

    def unpin_session(self, session: str, now: float) -> int:
        """End every pin of a session; returns how many."""
        self._now = now
        entries = list(self._pinned.get(session, {}).values())
        for entry in entries:
            self._end_pin(entry, session)
        return len(entries)

    def expire(self, now: float) -> list[tuple[str, Entry]]:
        """End the pins whose expiry has come; returns each as (session, entry)."""
        self._now = now
        ended = []
        while (record := self._expiries.pop_due(now)) is not None:
            _, generation, session = record
            entry = self._held[generation]
            self._end_pin(entry, session)
            ended.append((session, entry))
        return ended

    def next_expiry(self) -> float | None:
        """When the next pin expires (seconds on the caller's clock); None if none will."""
        return self._expiries.next()

    # ── forgetting ───────────────────────────────────────────────────────────

    def drop(self, key: str) -> bool:
        """Forget a READY item; its blocks become free with its last pin. False if not READY."""
        entry = self._found.get(key)
        if entry is None or not entry.ready:
            return False
        self._drop(entry, "dropped")
        return True

    def drop_all(self) -> int:
        """Drop all that is READY and condemn all that is being saved; returns how many."""
        entries = list(self._found.values())
        for entry in entries:
            if entry.ready:
                self._drop(entry, "dropped")
            else:
                self._hide(entry, "condemned")
        return len(entries)

    # ── looking ──────────────────────────────────────────────────────────────

    def usage(self) -> Usage:
        """How full the pool is, in blocks."""
        return Usage(
            num_blocks=self.num_blocks,
            free=self._free.total,
            saving=self._saving_blocks,
            ready=self._pinned_blocks + self._evictable_blocks,
            pinned=self._pinned_blocks,
            entries=len(self._held),
            largest_free_extent=self._free.largest(),
        )

    def story(self, key: str) -> list[str]:
        """What happened to a key lately, one line an event, oldest first (bounded)."""
        return self._stories.of(key)

    def validate(self) -> None:
        """Check every invariant, at a cost that grows with the pool. Raises InternalError."""
        self._free.validate()
        audit(
            Books(
                num_blocks=self.num_blocks,
                block_bytes=self.block_bytes,
                free_runs=self._free.runs(),
                held=self._held,
                found=self._found,
                saving=self._saving,
                pinned=self._pinned,
                evictable=self._evictable,
                saving_blocks=self._saving_blocks,
                pinned_blocks=self._pinned_blocks,
                evictable_blocks=self._evictable_blocks,
                told=self._told,
            )
        )

    # ── inside ───────────────────────────────────────────────────────────────

    def _find_room(self, need: int) -> list[tuple[int, int]]:
        """Take blocks that are free or can be made so. The caller knows that there are enough."""
        more_entries, more_blocks = _MORE_EVICTIONS, need
        while True:
            start = self._free.take_run(need)
            if start is not None:
                return [(start, need)]
            if self._free.total < need:
                self._drop(self._victim(need), "evicted")
                continue
            pieces = self._free.take(need, FEW_PIECES)
            if pieces is not None:
                return pieces
            victim = self._victim(need) if self._evictable else None
            if victim is None or not more_entries or victim.blocks > more_blocks:
                pieces = self._free.take(need, need)
                if pieces is None:
                    raise InternalError(f"{self._free.total} blocks free but not {need} of them")
                return pieces
            more_entries -= 1
            more_blocks -= victim.blocks
            self._drop(victim, "evicted")

    def _victim(self, need: int) -> Entry:
        """The least recently used; of the first few rather one that leaves one long run."""
        for entry in islice(self._evictable.values(), _LOOK_AHEAD):
            some = islice(entry.extents, FEW_PIECES)
            if any(self._free.run_after_giving(*extent) >= need for extent in some):
                return entry
        return next(iter(self._evictable.values()))

    def _drop(self, entry: Entry, event: str) -> None:
        if entry.state is EntryState.PINNED:
            self._hide(entry, event)
            return
        del self._evictable[entry.generation]
        self._evictable_blocks -= entry.blocks
        self._release(entry, event)

    def _hide(self, entry: Entry, event: str) -> None:
        self._move(entry, event)
        del self._found[entry.key]

    def _release(self, entry: Entry, event: str, detail: str = "") -> None:
        """Free the blocks of an entry that is in no index of its state any more."""
        del self._held[entry.generation]
        if entry.findable:
            del self._found[entry.key]
        if self.on_free is not None:
            self.on_free(entry)
        for start, count in entry.extents:
            self._free.give(start, count)
        self._move(entry, event, detail)

    def _make_evictable(self, entry: Entry) -> None:
        self._evictable[entry.generation] = entry
        self._evictable_blocks += entry.blocks

    def _being_saved(self, key: str, generation: int) -> Entry | None:
        entry = self._held.get(generation)
        if entry is None or entry.key != key or not entry.saving:
            return None
        return entry

    def _end_saving(self, entry: Entry) -> None:
        steps = self._saving[entry.owner]
        of_step = steps[entry.step]
        del of_step[entry.generation]
        if not of_step:
            del steps[entry.step]
            if not steps:
                del self._saving[entry.owner]
        self._saving_blocks -= entry.blocks

    def _abandon_all(self, groups: list[dict[int, Entry]], why: str) -> list[Entry]:
        entries = [entry for group in groups for entry in group.values()]
        for entry in entries:
            self._end_saving(entry)
            self._release(entry, "abandoned", why)
        return entries

    def _end_pin(self, entry: Entry, session: str) -> None:
        del entry.pins[session]
        held = self._pinned[session]
        del held[entry.generation]
        if not held:
            del self._pinned[session]
        if entry.pins:
            self._move(entry, "unpinned", session)
            return
        self._pinned_blocks -= entry.blocks
        if entry.state is EntryState.DROPPED:
            self._release(entry, "last pin ended", session)
        else:
            self._move(entry, "last pin ended", session)
            self._make_evictable(entry)

    def _pin_ends_at(self, record: Record) -> bool:
        expiry, generation, session = record
        entry = self._held.get(generation)
        return entry is not None and entry.pins.get(session) == expiry

    def _move(self, entry: Entry, event: str, detail: str = "") -> None:
        key = entry.key
        entry.state = ENTRY.after(entry.state, event, key, lambda: self._told(key))
        self._stories.add(key, self._now, entry.generation, event, detail)

    def _told(self, key: str) -> str:
        return "\n".join(self.story(key))
