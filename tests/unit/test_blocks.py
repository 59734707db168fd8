# SPDX-License-Identifier: Apache-2.0
"""The pool's bookkeeping: reservations, items, pins, eviction."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ec_connector.errors import InternalError, ItemTooLargeError, PoolFullError
from ec_connector.pool.blocks import BlockPool, Entry, EntryState

BLOCK = 10


def reserve(
    pool: BlockPool, key: str, blocks: int = 1, owner: bytes = b"w", step: int = 0
) -> Entry:
    """A reservation of so many blocks."""
    nbytes = blocks * BLOCK
    return pool.reserve(key, nbytes, "uint8", (nbytes,), owner=owner, step=step, now=1.0)


def ready(pool: BlockPool, key: str, blocks: int = 1) -> Entry:
    """A READY item of so many blocks."""
    entry = reserve(pool, key, blocks)
    assert pool.commit(key, entry.generation, 1.0) is entry
    return entry


@pytest.fixture
def pool() -> BlockPool:
    """Ten free blocks."""
    return BlockPool(10, BLOCK)


@pytest.fixture
def freed(pool: BlockPool) -> list[Entry]:
    """What became free, in order."""
    entries: list[Entry] = []
    pool.on_free = entries.append
    return entries


# ── saving ───────────────────────────────────────────────────────────────────


def test_reserve_commit(pool: BlockPool) -> None:
    """An item is findable from its reservation on and READY from its commit on."""
    entry = pool.reserve("a", 25, "bfloat16", (1, 5), owner=b"w", step=3, now=0.0)
    assert (entry.key, entry.nbytes, entry.dtype, entry.shape) == ("a", 25, "bfloat16", (1, 5))
    assert (entry.owner, entry.step, entry.state) == (b"w", 3, EntryState.SAVING)
    assert entry.extents == [(0, 3)]
    assert entry.generation > 0
    assert pool.get("a") is entry
    assert pool.commit("a", entry.generation, 1.0) is entry
    assert entry.state is EntryState.READY
    assert pool.get("a") is entry
    pool.validate()


def test_generations_are_unique(pool: BlockPool) -> None:
    """A key reserved again has another generation, so an old name never means new bytes."""
    first = reserve(pool, "a")
    pool.abandon("a", first.generation)
    assert reserve(pool, "a").generation != first.generation


def test_empty_item_has_a_block(pool: BlockPool) -> None:
    """An item of no bytes holds one block, which carries its generation."""
    assert reserve(pool, "empty", 0).blocks == 1
    pool.validate()


def test_commit_of_something_else(pool: BlockPool) -> None:
    """A commit of an unknown, foreign or finished generation changes nothing."""
    entry = reserve(pool, "a")
    assert pool.commit("a", entry.generation + 1, 1.0) is None
    assert pool.commit("b", entry.generation, 1.0) is None
    assert entry.state is EntryState.SAVING
    pool.commit("a", entry.generation, 1.0)
    assert pool.commit("a", entry.generation, 1.0) is None
    assert pool.get("a") is entry


def test_abandon(pool: BlockPool, freed: list[Entry]) -> None:
    """An abandoned reservation is gone, once, and its blocks are free."""
    entry = reserve(pool, "a", 4)
    assert pool.abandon("a", entry.generation)
    assert not pool.abandon("a", entry.generation)
    assert pool.get("a") is None
    assert freed == [entry]
    assert pool.usage().free == 10


def test_abandon_spares_a_ready_item(pool: BlockPool) -> None:
    """What is READY cannot be abandoned."""
    entry = ready(pool, "a")
    assert not pool.abandon("a", entry.generation)
    assert pool.get("a") is entry


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_condemned_blocks_wait_for_the_writer(
    pool: BlockPool, freed: list[Entry], end: str
) -> None:
    """A condemned reservation is hidden but holds its blocks until its writer has ended."""
    slow = reserve(pool, "a", 6)
    assert pool.condemn("a", slow.generation)
    assert not pool.condemn("a", slow.generation)
    assert pool.get("a") is None
    with pytest.raises(PoolFullError):
        reserve(pool, "big", 5)
    again = reserve(pool, "a", 4)
    assert not blocks_of(slow) & blocks_of(again)
    pool.validate()
    assert freed == []
    if end == "commit":
        assert pool.commit("a", slow.generation, 2.0) is None
    else:
        assert pool.abandon("a", slow.generation)
    assert freed == [slow]
    assert pool.get("a") is again
    assert pool.usage().free == 6
    pool.validate()


def test_condemn_spares_a_ready_item(pool: BlockPool) -> None:
    """Only what is being saved can be condemned."""
    entry = ready(pool, "a")
    assert not pool.condemn("a", entry.generation)
    assert pool.get("a") is entry


def test_abandon_steps(pool: BlockPool) -> None:
    """The end of a step frees that owner's reservations up to it, condemned ones too."""
    old = reserve(pool, "old", step=1)
    condemned = reserve(pool, "condemned", step=2)
    pool.condemn("condemned", condemned.generation)
    saved = reserve(pool, "saved", step=2)
    pool.commit("saved", saved.generation, 1.0)
    later = reserve(pool, "later", step=3)
    other = reserve(pool, "other", owner=b"x", step=1)
    assert pool.abandon_steps(b"w", 2) == [old, condemned]
    assert pool.abandon_steps(b"w", 2) == []
    assert pool.get("saved") is saved
    assert pool.get("later") is later
    assert pool.get("other") is other
    assert pool.usage().free == 7
    pool.validate()


def test_abandon_owner(pool: BlockPool) -> None:
    """A dead owner's reservations of every step are freed, nobody else's, nothing READY."""
    kept = ready(pool, "kept")
    mine = [reserve(pool, f"mine{step}", step=step) for step in range(3)]
    other = reserve(pool, "other", owner=b"x")
    assert pool.abandon_owner(b"w") == mine
    assert pool.abandon_owner(b"w") == []
    assert pool.get("kept") is kept
    assert pool.get("other") is other
    pool.validate()


def test_reserve_twice_is_a_bug(pool: BlockPool) -> None:
    """Reserving a key that is held raises, and tells the key's story."""
    reserve(pool, "a")
    with pytest.raises(InternalError, match="reserved"):
        reserve(pool, "a")
    with pytest.raises(InternalError, match="-10 bytes"):
        reserve(pool, "b", -1)


# ── room and eviction ────────────────────────────────────────────────────────


def test_too_large_ever(pool: BlockPool) -> None:
    """An item larger than the pool is told apart from a pool that is full, and evicts nothing."""
    kept = ready(pool, "a")
    with pytest.raises(ItemTooLargeError, match=r"needs 11 blocks.*whole pool has 10"):
        reserve(pool, "b", 11)
    assert pool.get("a") is kept


def test_no_eviction_in_vain(pool: BlockPool) -> None:
    """When eviction cannot make enough room, nothing is evicted."""
    for key in ("a", "b", "c"):
        ready(pool, key, 2)
    pool.pin("a", "s", None, 1.0)
    reserve(pool, "saving", 2)
    with pytest.raises(PoolFullError, match="2 free, 4 evictable, 2 pinned and 2 being saved"):
        reserve(pool, "big", 7)
    assert pool.get("b") is not None
    assert pool.get("c") is not None
    assert reserve(pool, "fits", 6).blocks == 6
    pool.validate()


def test_least_recently_used_goes_first(pool: BlockPool, freed: list[Entry]) -> None:
    """Items go in the order of their last use: commit, touch or end of the last pin."""
    a, b, c, d, e = (ready(pool, key, 2) for key in "abcde")
    pool.touch("a", 2.0)
    pool.pin("b", "s", None, 2.0)
    pool.unpin(b.generation, "s", 3.0)
    for number in range(5):
        reserve(pool, f"new{number}", 2)
        pool.validate()
    assert freed == [c, d, e, a, b]


def test_touch_of_what_cannot_be_evicted(pool: BlockPool) -> None:
    """Touching an unknown, unsaved or pinned key does nothing."""
    reserve(pool, "saving")
    ready(pool, "pinned")
    pool.pin("pinned", "s", None, 1.0)
    for key in ("unknown", "saving", "pinned"):
        pool.touch(key, 2.0)
    pool.validate()


def test_evicts_no_more_than_needed(pool: BlockPool) -> None:
    """One item goes when the room of one is enough."""
    for key in "abcde":
        ready(pool, key, 2)
    reserve(pool, "new", 2)
    assert [key for key in "abcde" if pool.get(key)] == ["b", "c", "d", "e"]


def test_victim_that_leaves_one_run(pool: BlockPool) -> None:
    """Of the least recently used the one goes whose blocks make one long enough run."""
    ready(pool, "small", 1)
    ready(pool, "pinned", 1)
    pool.pin("pinned", "s", None, 1.0)
    ready(pool, "large", 4)
    ready(pool, "newest", 4)
    entry = reserve(pool, "new", 4)
    assert len(entry.extents) == 1
    assert pool.get("small") is not None
    assert pool.get("large") is None


def test_pieces_rather_than_nothing(pool: BlockPool) -> None:
    """When only scattered blocks are free, an item gets several extents."""
    entries = [ready(pool, str(number)) for number in range(10)]
    for entry in entries[1::2]:
        pool.pin(entry.key, "s", None, 1.0)
    entry = reserve(pool, "new", 5)
    assert entry.extents == [(0, 1), (2, 1), (4, 1), (6, 1), (8, 1)]
    pool.validate()


def scattered(size: int, kept: int, pin: bool = False) -> BlockPool:
    """48 blocks of which every second is free and the others are pinned.

    Behind them ``kept`` items, pinned or evictable, of ``size`` blocks each with
    a pinned block behind it.
    """
    pool = BlockPool(48 + kept * (size + 1), BLOCK)
    for number in range(48):
        ready(pool, str(number))
    for number in range(kept):
        ready(pool, f"kept{number}", size)
        ready(pool, f"between{number}")
        pool.pin(f"between{number}", "s", None, 1.0)
        if pin:
            pool.pin(f"kept{number}", "s", None, 1.0)
    for number in range(0, 48, 2):
        pool.pin(str(number + 1), "s", None, 1.0)
        pool.drop(str(number))
    return pool


def gone(pool: BlockPool, kept: int) -> int:
    """How many of the kept items were evicted."""
    return sum(pool.get(f"kept{number}") is None for number in range(kept))


def test_a_little_more_is_evicted_for_fewer_pieces() -> None:
    """Where an item would be in very many pieces, few more items go to spare it that."""
    pool = scattered(size=2, kept=20)
    entry = reserve(pool, "new", 20)
    assert gone(pool, 20) == 4
    assert len(entry.extents) == 16
    pool.validate()


def test_a_little_more_is_not_many_entries() -> None:
    """No more than eight further items go, be it of use or not."""
    pool = scattered(size=1, kept=20)
    entry = reserve(pool, "new", 24)
    assert gone(pool, 20) == 8
    assert len(entry.extents) == 24


def test_a_little_more_is_not_many_blocks() -> None:
    """The further items together are no larger than the new one."""
    pool = BlockPool(128, BLOCK)
    for number in range(128):
        ready(pool, str(number))
    for number in range(0, 128, 2):
        pool.pin(str(number + 1), "s", None, 1.0)
        pool.drop(str(number))
    # Each in 20 pieces, so that its eviction does not help.
    for entry in [reserve(pool, key, 20) for key in ("kept0", "kept1")]:
        pool.commit(entry.key, entry.generation, 1.0)
    assert len(reserve(pool, "new", 20).extents) == 20
    assert gone(pool, 2) == 1


def test_many_pieces_when_nothing_more_can_go() -> None:
    """An item that fits is never refused for the number of its pieces."""
    pool = scattered(size=1, kept=4, pin=True)
    entry = reserve(pool, "new", 24)
    assert len(entry.extents) == 24
    pool.validate()


def test_blocks_are_reported_free_before_they_are_used_again(pool: BlockPool) -> None:
    """on_free of an evicted item runs when its blocks belong to nobody."""
    ready(pool, "a", 10)
    seen: list[tuple[str, Entry | None, Entry | None]] = []
    pool.on_free = lambda entry: seen.append((entry.key, pool.get("a"), pool.get("b")))
    reserve(pool, "b", 10)
    assert seen == [("a", None, None)]


def test_ready_is_reported(pool: BlockPool) -> None:
    """on_ready runs with each item that becomes READY, and not for a condemned one."""
    seen: list[Entry] = []
    pool.on_ready = seen.append
    entry = ready(pool, "a")
    condemned = reserve(pool, "b")
    pool.condemn("b", condemned.generation)
    pool.commit("b", condemned.generation, 1.0)
    assert seen == [entry]


# ── pins ─────────────────────────────────────────────────────────────────────


def test_pinned_stays(pool: BlockPool) -> None:
    """A pinned item is not evicted; after its last pin it can be."""
    entry = ready(pool, "a", 10)
    pool.pin("a", "one", None, 1.0)
    pool.pin("a", "two", None, 1.0)
    assert pool.unpin(entry.generation, "one", 2.0)
    with pytest.raises(PoolFullError):
        reserve(pool, "b")
    assert pool.unpin(entry.generation, "two", 2.0)
    reserve(pool, "b")
    pool.validate()


def test_pin_is_one_per_session(pool: BlockPool) -> None:
    """A session that pins twice has one pin, and one unpin ends it."""
    entry = ready(pool, "a")
    assert pool.pin("a", "s", 5.0, 1.0) is entry
    assert pool.pin("a", "s", 9.0, 2.0) is entry
    assert pool.pin("a", "s", 9.0, 2.0) is entry
    assert entry.pins == {"s": 9.0}
    assert pool.unpin(entry.generation, "s", 3.0)
    assert not pool.unpin(entry.generation, "s", 3.0)
    assert pool.usage().pinned == 0


def test_unpin_of_nothing(pool: BlockPool) -> None:
    """An unknown generation or session ends no pin."""
    entry = ready(pool, "a")
    pool.pin("a", "s", None, 1.0)
    assert not pool.unpin(entry.generation + 1, "s", 2.0)
    assert not pool.unpin(entry.generation, "other", 2.0)
    assert entry.pins == {"s": None}


def test_pin_needs_a_ready_item(pool: BlockPool) -> None:
    """Pinning what is not there, or not yet, is a bug and raises."""
    with pytest.raises(InternalError, match="pin: 'a' is not held"):
        pool.pin("a", "s", None, 1.0)
    reserve(pool, "a")
    with pytest.raises(InternalError, match="entry 'a': 'pinned' cannot happen in state 'saving'"):
        pool.pin("a", "s", None, 1.0)


def test_unpin_session(pool: BlockPool) -> None:
    """A session's pins end together; other sessions' stay."""
    for key in "ab":
        ready(pool, key)
        pool.pin(key, "gone", 9.0, 1.0)
    pool.pin("b", "stays", None, 1.0)
    assert pool.unpin_session("gone", 2.0) == 2
    assert pool.unpin_session("gone", 2.0) == 0
    assert pool.usage().pinned == 1
    assert pool.next_expiry() is None
    pool.validate()


def test_expire(pool: BlockPool) -> None:
    """Pins end when their time has come, in that order, and each once."""
    a, b, _ = (ready(pool, key) for key in "abc")
    pool.pin("b", "s", 3.0, 1.0)
    pool.pin("a", "s", 2.0, 1.0)
    pool.pin("c", "s", None, 1.0)
    assert pool.next_expiry() == 2.0
    assert pool.expire(1.9) == []
    assert pool.expire(3.0) == [("s", a), ("s", b)]
    assert pool.expire(9.0) == []
    assert pool.next_expiry() is None
    assert pool.usage().pinned == 1
    pool.validate()


@pytest.mark.parametrize(("renewed", "ends"), [(7.0, 7.0), (3.0, 3.0), (None, None)])
def test_renewal_counts(pool: BlockPool, renewed: float | None, ends: float | None) -> None:
    """A renewed pin ends at its new time, be it later, sooner or never."""
    entry = ready(pool, "a")
    pool.pin("a", "s", 5.0, 1.0)
    pool.pin("a", "s", renewed, 2.0)
    assert pool.next_expiry() == ends
    if ends is None:
        assert pool.expire(1e9) == []
    else:
        assert pool.expire(ends - 0.1) == []
        assert pool.expire(ends) == [("s", entry)]


def test_renewals_do_not_pile_up(pool: BlockPool) -> None:
    """Pins renewed over and over keep a bounded number of expiry records."""
    ready(pool, "a")
    for number in range(10_000):
        pool.pin("a", f"s{number % 10}", float(number), 0.0)
    assert len(pool._expiries) <= 65
    assert len(pool.expire(1e9)) == 10


# ── forgetting ───────────────────────────────────────────────────────────────


def test_drop(pool: BlockPool, freed: list[Entry]) -> None:
    """A dropped item is gone and free; what is not READY is not dropped."""
    entry = ready(pool, "a")
    reserve(pool, "saving")
    assert pool.drop("a")
    assert freed == [entry]
    assert not pool.drop("a")
    assert not pool.drop("saving")
    assert pool.get("saving") is not None
    pool.validate()


def test_dropped_blocks_wait_for_the_last_reader(pool: BlockPool, freed: list[Entry]) -> None:
    """A pinned item that is dropped is hidden, its blocks stay until its last pin ends."""
    old = ready(pool, "a", 5)
    pool.pin("a", "one", None, 1.0)
    pool.pin("a", "two", 4.0, 1.0)
    assert pool.drop("a")
    assert pool.get("a") is None
    new = ready(pool, "a", 5)
    assert not blocks_of(old) & blocks_of(new)
    assert new.generation != old.generation
    pool.validate()
    assert pool.unpin(old.generation, "one", 2.0)
    assert freed == []
    assert pool.expire(4.0) == [("two", old)]
    assert freed == [old]
    assert pool.get("a") is new
    pool.validate()


def test_drop_all(pool: BlockPool) -> None:
    """Everything is hidden at once, and blocks come back as writers and readers end."""
    ready(pool, "idle", 2)
    pinned = ready(pool, "pinned", 3)
    pool.pin("pinned", "s", None, 1.0)
    saving = reserve(pool, "saving", 4)
    assert pool.drop_all() == 3
    assert pool.drop_all() == 0
    assert [pool.get(key) for key in ("idle", "pinned", "saving")] == [None, None, None]
    assert pool.usage().free == 3
    pool.validate()
    assert pool.commit("saving", saving.generation, 2.0) is None
    assert pool.unpin(pinned.generation, "s", 2.0)
    assert pool.usage().free == 10
    pool.validate()


# ── looking ──────────────────────────────────────────────────────────────────


def test_usage(pool: BlockPool) -> None:
    """Usage counts blocks by what they are held for."""
    ready(pool, "idle", 1)
    ready(pool, "pinned", 2)
    pool.pin("pinned", "s", None, 1.0)
    reserve(pool, "saving", 3)
    usage = pool.usage()
    assert (usage.num_blocks, usage.free, usage.saving, usage.ready, usage.pinned) == (
        10,
        4,
        3,
        3,
        2,
    )
    assert (usage.entries, usage.largest_free_extent) == (3, 4)


def test_story(pool: BlockPool) -> None:
    """A key's life can be read, and reading it costs bounded memory."""
    entry = ready(pool, "a")
    pool.pin("a", "peer-1", 5.0, 2.0)
    pool.expire(5.0)
    pool.drop("a")
    told = [line.split(": ", 1)[1] for line in pool.story("a")]
    assert told == ["reserved", "written", "pinned (peer-1)", "last pin ended (peer-1)", "dropped"]
    assert pool.story("a")[0].startswith(f"1.000000 generation {entry.generation}")
    assert pool.story("unknown") == []
    for _ in range(100):
        pool.abandon("a", reserve(pool, "a").generation)
    assert len(pool.story("a")) == 16
    for number in range(5000):
        pool.abandon(str(number), reserve(pool, str(number)).generation)
    assert pool.story("a") == []


def test_impossible_pool() -> None:
    """A pool without blocks is refused."""
    with pytest.raises(InternalError):
        BlockPool(0, 10)


def spoil_held(pool: BlockPool) -> None:
    entry = pool.get("idle")
    assert entry is not None
    del pool._held[entry.generation]


def spoil_extents(pool: BlockPool) -> None:
    entry = pool.get("idle")
    assert entry is not None
    entry.extents = [(5, 1)]


def spoil_last(pool: BlockPool) -> None:
    pool._free.take_run(7)


def spoil_size(pool: BlockPool) -> None:
    entry = pool.get("idle")
    assert entry is not None
    entry.nbytes = 1000


def spoil_findable(pool: BlockPool) -> None:
    del pool._found["idle"]


def spoil_key(pool: BlockPool) -> None:
    pool._found["other"] = pool._found["idle"]


def spoil_state(pool: BlockPool) -> None:
    entry = pool.get("pinned")
    assert entry is not None
    entry.state = EntryState.SAVING


def spoil_generation(pool: BlockPool) -> None:
    entry = pool.get("idle")
    assert entry is not None
    entry.generation = 77


def spoil_dropped(pool: BlockPool) -> None:
    pool._found.pop("idle").state = EntryState.FREE


def spoil_evictable(pool: BlockPool) -> None:
    pool._evictable.clear()


def spoil_pins(pool: BlockPool) -> None:
    pool._pinned.clear()


def spoil_empty_session(pool: BlockPool) -> None:
    pool._pinned["nobody"] = {}


def spoil_empty_owner(pool: BlockPool) -> None:
    pool._saving[b"nobody"] = {}


def spoil_count(pool: BlockPool) -> None:
    pool._pinned_blocks += 1


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_held, "lost"),
        (spoil_extents, "lost|twice"),
        (spoil_last, "blocks from 3 to 10 are lost"),
        (spoil_size, "1000 bytes in 1 blocks of 10"),
        (spoil_findable, "findable=True is not so"),
        (spoil_key, "'other' is findable but holds no blocks"),
        (spoil_state, "1 pins in state 'saving'"),
        (spoil_generation, "is held as 1, it is 77"),
        (spoil_dropped, "free, yet it holds blocks"),
        (spoil_evictable, "evictable"),
        (spoil_pins, "pins"),
        (spoil_empty_session, "session without pins"),
        (spoil_empty_owner, "owner or a step"),
        (spoil_count, "blocks pinned"),
    ],
)
def test_validate_notices(pool: BlockPool, spoil: Callable[[BlockPool], None], text: str) -> None:
    """Each kind of broken book is noticed and named."""
    ready(pool, "idle")
    ready(pool, "pinned")
    pool.pin("pinned", "s", None, 1.0)
    reserve(pool, "saving")
    pool.validate()
    spoil(pool)
    with pytest.raises(InternalError, match=text):
        pool.validate()


def blocks_of(entry: Entry) -> set[int]:
    """The blocks an entry holds."""
    return {block for start, count in entry.extents for block in range(start, start + count)}
