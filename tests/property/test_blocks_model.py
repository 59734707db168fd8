# SPDX-License-Identifier: Apache-2.0
"""Random lives of a pool beside a plain model of who may use which block."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ec_connector.errors import ItemTooLargeError, PoolFullError
from ec_connector.pool.blocks import BlockPool, Entry, EntryState

BLOCK = 8
KEYS = st.sampled_from("abcdefgh")
SESSIONS = st.sampled_from(["p", "q", "r"])
OWNERS = st.sampled_from([b"v", b"w"])
SIZES = st.integers(0, 12 * BLOCK)
STEPS = st.integers(0, 5)
LIVES = st.none() | st.integers(0, 5)
PICKS = st.integers(0, 30)


@dataclass
class Item:
    """What the model knows of one generation."""

    key: str
    blocks: frozenset[int]
    owner: bytes
    step: int
    ready: bool = False
    hidden: bool = False
    pins: dict[str, float | None] = field(default_factory=dict)

    @property
    def evictable(self) -> bool:
        return self.ready and not self.hidden and not self.pins


class PoolWalk(RuleBasedStateMachine):
    """Every rule predicts the pool's answer from the model, then lets the model follow."""

    @initialize(num_blocks=st.integers(8, 40))
    def start(self, num_blocks: int) -> None:
        self.now = 0.0
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks, BLOCK)
        self.pool.on_free = self.freed_by_pool
        self.items: dict[int, Item] = {}
        self.freed: list[int] = []
        self.newest = 0

    def freed_by_pool(self, entry: Entry) -> None:
        self.freed.append(entry.generation)

    def live(self, key: str) -> int | None:
        found = [g for g, item in self.items.items() if item.key == key and not item.hidden]
        assert len(found) <= 1
        return found[0] if found else None

    def any_item(self, *, ready: bool) -> bool:
        return any(item.ready == ready for item in self.items.values())

    def expect_freed(self, generations: list[int]) -> None:
        """Exactly these became free; the model forgets them."""
        assert sorted(self.freed) == sorted(generations)
        self.freed.clear()
        for generation in generations:
            del self.items[generation]

    def free_blocks(self) -> int:
        return self.num_blocks - sum(len(item.blocks) for item in self.items.values())

    def choose(self, pick: int, *, ready: bool) -> int:
        """One of the held generations that are READY, or that are being saved."""
        some = [g for g, item in self.items.items() if item.ready == ready]
        return some[pick % len(some)]

    def reserve(self, key: str, nbytes: int, owner: bytes, step: int) -> Entry | None:
        if self.live(key) is not None:
            return None
        need = max(1, -(-nbytes // BLOCK))
        free = self.free_blocks()
        evictable = {g: item for g, item in self.items.items() if item.evictable}
        room = free + sum(len(item.blocks) for item in evictable.values())
        try:
            entry = self.pool.reserve(
                key, nbytes, "uint8", (nbytes,), owner=owner, step=step, now=self.now
            )
        except ItemTooLargeError:
            event("too large")
            assert need > self.num_blocks
            assert not self.freed
            return None
        except PoolFullError:
            event("pool full")
            assert room < need <= self.num_blocks
            assert not self.freed
            return None
        assert need <= room
        assert set(self.freed) <= set(evictable)
        if self.freed:
            event("evicted")
            gone = [len(evictable[generation].blocks) for generation in self.freed]
            # What was missing, one item's excess, and what fewer pieces may cost.
            assert sum(gone) <= max(0, need - free) + max(gone) + need
        self.expect_freed(list(self.freed))
        held = [b for start, count in entry.extents for b in range(start, start + count)]
        assert len(held) == len(set(held)) == need
        assert all(0 <= block < self.num_blocks for block in held)
        for item in self.items.values():
            assert not item.blocks & set(held)
        if len(entry.extents) > 1:
            event("several extents")
        assert entry.generation > self.newest
        self.newest = entry.generation
        self.items[entry.generation] = Item(key, frozenset(held), owner, step)
        return entry

    @rule(key=KEYS, nbytes=SIZES, owner=OWNERS, step=STEPS)
    def reserve_only(self, key: str, nbytes: int, owner: bytes, step: int) -> None:
        self.reserve(key, nbytes, owner, step)

    @rule(key=KEYS, nbytes=SIZES, session=st.none() | SESSIONS, life=LIVES)
    def put(self, key: str, nbytes: int, session: str | None, life: int | None) -> None:
        entry = self.reserve(key, nbytes, b"v", 0)
        if entry is None:
            return
        self.commit_one(entry.generation)
        if session is not None:
            self.pin_one(key, session, life)

    def commit_one(self, generation: int) -> None:
        item = self.items[generation]
        entry = self.pool.commit(item.key, generation, self.now)
        if item.hidden:
            event("commit of a condemned one")
            assert entry is None
            self.expect_freed([generation])
        else:
            assert entry is not None
            assert entry.state is EntryState.READY
            item.ready = True

    @precondition(lambda self: self.any_item(ready=False))
    @rule(pick=PICKS)
    def commit(self, pick: int) -> None:
        self.commit_one(self.choose(pick, ready=False))

    @precondition(lambda self: self.any_item(ready=False))
    @rule(pick=PICKS)
    def abandon(self, pick: int) -> None:
        generation = self.choose(pick, ready=False)
        assert self.pool.abandon(self.items[generation].key, generation)
        self.expect_freed([generation])

    @precondition(lambda self: self.any_item(ready=False))
    @rule(pick=PICKS)
    def condemn(self, pick: int) -> None:
        generation = self.choose(pick, ready=False)
        item = self.items[generation]
        assert self.pool.condemn(item.key, generation) != item.hidden
        item.hidden = True

    @precondition(lambda self: self.any_item(ready=True))
    @rule(pick=PICKS)
    def late_word_of_the_writer(self, pick: int) -> None:
        generation = self.choose(pick, ready=True)
        key = self.items[generation].key
        assert self.pool.commit(key, generation, self.now) is None
        assert not self.pool.abandon(key, generation)
        assert not self.pool.condemn(key, generation)

    @rule(key=KEYS, session=SESSIONS, past=st.integers(0, 100))
    def word_about_a_past_one(self, key: str, session: str, past: int) -> None:
        if past in self.items:
            return
        assert self.pool.commit(key, past, self.now) is None
        assert not self.pool.abandon(key, past)
        assert not self.pool.condemn(key, past)
        assert not self.pool.unpin(past, session, self.now)

    def pin_one(self, key: str, session: str, life: int | None) -> None:
        generation = self.live(key)
        assert generation is not None
        expiry = None if life is None else self.now + life
        entry = self.pool.pin(key, session, expiry, self.now)
        assert entry.generation == generation
        self.items[generation].pins[session] = expiry
        assert entry.pins == self.items[generation].pins

    @precondition(lambda self: self.any_item(ready=True))
    @rule(pick=PICKS, session=SESSIONS, life=LIVES)
    def pin(self, pick: int, session: str, life: int | None) -> None:
        item = self.items[self.choose(pick, ready=True)]
        if not item.hidden:
            self.pin_one(item.key, session, life)

    def end_pins(self, ended: list[tuple[int, str]]) -> None:
        touched = {generation for generation, _ in ended}
        for generation, session in ended:
            del self.items[generation].pins[session]
        over = [g for g in touched if self.items[g].hidden and not self.items[g].pins]
        if over:
            event("last reader of a dropped one gone")
        self.expect_freed(over)

    @precondition(lambda self: self.any_item(ready=True))
    @rule(pick=PICKS, session=SESSIONS)
    def unpin(self, pick: int, session: str) -> None:
        generation = self.choose(pick, ready=True)
        has = session in self.items[generation].pins
        assert self.pool.unpin(generation, session, self.now) == has
        self.end_pins([(generation, session)] if has else [])

    @rule(seconds=st.integers(0, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        expiries = [
            (expiry, generation, session)
            for generation, item in self.items.items()
            for session, expiry in item.pins.items()
            if expiry is not None
        ]
        assert self.pool.next_expiry() == min((e for e, _, _ in expiries), default=None)
        due = sorted((g, s) for e, g, s in expiries if e <= self.now)
        ended = self.pool.expire(self.now)
        assert sorted((entry.generation, session) for session, entry in ended) == due
        if due:
            event("expired")
        self.end_pins(due)

    @precondition(lambda self: self.any_item(ready=True))
    @rule(pick=PICKS, drop=st.booleans())
    def touch_or_drop(self, pick: int, drop: bool) -> None:
        generation = self.choose(pick, ready=True)
        item = self.items[generation]
        if not drop:
            self.pool.touch(item.key, self.now)
            return
        found = self.live(item.key)
        assert self.pool.drop(item.key) == (found is not None and self.items[found].ready)
        if found is not None and self.items[found].ready:
            self.items[found].hidden = True
            pinned = bool(self.items[found].pins)
            event("dropped while pinned" if pinned else "dropped")
            self.expect_freed([] if pinned else [found])

    @rule(
        what=st.sampled_from(["steps", "steps", "owner", "session", "all"]),
        owner=OWNERS,
        step=STEPS,
        session=SESSIONS,
    )
    def many_at_once(self, what: str, owner: bytes, step: int, session: str) -> None:
        event(f"end of {what}")
        if what == "session":
            due = [(g, session) for g, item in self.items.items() if session in item.pins]
            assert self.pool.unpin_session(session, self.now) == len(due)
            self.end_pins(due)
        elif what == "all":
            live = {g: item for g, item in self.items.items() if not item.hidden}
            assert self.pool.drop_all() == len(live)
            for item in live.values():
                item.hidden = True
            self.expect_freed([g for g, item in live.items() if item.ready and not item.pins])
        else:
            over = step if what == "steps" else 99
            gone = [
                g
                for g, item in self.items.items()
                if not item.ready and item.owner == owner and item.step <= over
            ]
            if what == "steps":
                entries = self.pool.abandon_steps(owner, step)
            else:
                entries = self.pool.abandon_owner(owner)
            assert sorted(entry.generation for entry in entries) == sorted(gone)
            self.expect_freed(gone)

    @invariant()
    def books_agree(self) -> None:
        self.pool.validate()
        assert not self.freed
        for key in "abcdefgh":
            entry = self.pool.get(key)
            assert (entry.generation if entry else None) == self.live(key)
        usage = self.pool.usage()
        assert usage.free == self.free_blocks()
        assert usage.entries == len(self.items)
        assert usage.saving == sum(len(i.blocks) for i in self.items.values() if not i.ready)
        assert usage.pinned == sum(len(i.blocks) for i in self.items.values() if i.pins)


PoolWalk.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True
)


class TestPoolWalk(PoolWalk.TestCase):
    """No block has two users, and each answer is the one the model gives, on any walk."""

    pytestmark = pytest.mark.property
