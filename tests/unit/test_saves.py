# SPDX-License-Identifier: Apache-2.0
"""Room for what an engine will save, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ec_connector.pool.blocks import BlockPool, EntryState
from ec_connector.protocol.local import Reserve, ReservedItem, ReserveItem, Saved, SaveFailed
from ec_connector.protocol.messages import MAX_HASH_CHARS, MAX_RANK
from ec_connector.protocol.saves import Lost, SaveDesk

BLOCKS, BLOCK = 8, 1024
ENGINE, OTHER = b"engine", b"other"


class Desk(SaveDesk):
    """A desk and the pool behind it."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS, BLOCK)
        super().__init__(self.pool)

    def room(
        self, key: str, nbytes: int = 100, step: int = 1, owner: bytes = ENGINE, **more: bool
    ) -> ReservedItem:
        """Ask for room for one item."""
        item = ReserveItem(key, nbytes, "uint8", [nbytes])
        (place,) = self.reserve(owner, Reserve(1, step, [item], **more), 0.0).items
        return place


@pytest.fixture
def desk() -> Iterator[Desk]:
    """A desk whose pool is valid in the end."""
    desk = Desk()
    yield desk
    desk.pool.validate()


def test_answer_is_in_the_order_asked(desk: Desk) -> None:
    """Each item has its own answer, also those without room, and the number comes back."""
    items = [ReserveItem(key, size, "uint8", [size]) for key, size in (("a", 10), ("b", 9999))]
    answer = desk.reserve(ENGINE, Reserve(7, 1, items), 0.0)
    assert answer.seq == 7
    assert [item.key for item in answer.items] == ["a", "b"]
    assert answer.items[0].extents
    assert not answer.items[0].refused
    assert "whole pool" in answer.items[1].refused
    assert desk.counts["reserve_refused"] == 1


def test_saved_is_ready(desk: Desk) -> None:
    """From then on the pool has it, and asking again costs nothing."""
    place = desk.room("a")
    assert desk.saved(Saved([("a", place.generation)]), 1.0) == ["a"]
    assert desk.counts["saved"] == 1
    again = desk.room("a")
    assert (again.held, again.generation, again.extents) == (True, place.generation, [])


def test_on_its_way_is_held(desk: Desk) -> None:
    """Two steps that encode the same item write it once."""
    place = desk.room("a", step=1)
    again = desk.room("a", step=2)
    assert (again.held, again.generation) == (True, place.generation)
    assert desk.pool.usage().saving == 1


def test_asking_again_keeps_it_from_eviction(desk: Desk) -> None:
    """An item that is wanted once more is not the next to go."""
    for key in "ab":
        desk.saved(Saved([(key, desk.room(key, 3 * BLOCK).generation)]), 0.0)
    desk.room("a", 3 * BLOCK)
    desk.room("c", 4 * BLOCK)
    assert desk.pool.get("a") is not None
    assert desk.pool.get("b") is None


def test_new_content_takes_the_keys_place(desk: Desk) -> None:
    """A key whose size, or whose bytes by declaration, are other than before."""
    first = desk.room("a", 100)
    desk.saved(Saved([("a", first.generation)]), 0.0)
    other_size = desk.room("a", 200)
    assert not other_size.held
    assert other_size.generation != first.generation
    desk.saved(Saved([("a", other_size.generation)]), 0.0)
    replaced = desk.room("a", 200, replace=True)
    assert not replaced.held
    assert replaced.generation != other_size.generation


@pytest.mark.parametrize("replace", [False, True])
def test_other_content_while_it_is_saved(desk: Desk, replace: bool) -> None:
    """Somebody writes there: the second is refused, and the first goes on."""
    place = desk.room("a", 100)
    refused = desk.room("a", 200 if not replace else 100, replace=replace)
    assert "being saved already" in refused.refused
    assert desk.saved(Saved([("a", place.generation)]), 0.0) == ["a"]


@pytest.mark.parametrize(
    ("item", "word"),
    [
        (ReserveItem("a", -1, "uint8", [1]), "no item"),
        (ReserveItem("a", 1, "uint8", [-1]), "no item"),
        (ReserveItem("a", 1, "uint8", [1] * (MAX_RANK + 1)), "no item"),
        (ReserveItem("a" * (MAX_HASH_CHARS + 1), 1, "uint8", [1]), "characters"),
        (ReserveItem("a", 2**63, "uint8", [2**63]), "whole pool"),
    ],
)
def test_what_no_message_could_announce(desk: Desk, item: ReserveItem, word: str) -> None:
    """It is refused before anything is reserved."""
    (place,) = desk.reserve(ENGINE, Reserve(1, 1, [item]), 0.0).items
    assert word in place.refused
    assert desk.pool.usage().free == BLOCKS


def test_longest_key_and_deepest_shape(desk: Desk) -> None:
    """The limits themselves are allowed."""
    item = ReserveItem("a" * MAX_HASH_CHARS, 1, "uint8", [1] * MAX_RANK)
    (place,) = desk.reserve(ENGINE, Reserve(1, 1, [item]), 0.0).items
    assert not place.refused


def test_too_late(desk: Desk) -> None:
    """A save of a reservation that was freed meanwhile makes nothing ready."""
    place = desk.room("a", step=1)
    assert desk.step_done(ENGINE, 1) == [Lost("a")]
    assert desk.saved(Saved([("a", place.generation)]), 0.0) == []
    assert desk.counts["saved_too_late"] == 1
    assert desk.saved(Saved([("never", 99)]), 0.0) == []


def test_a_late_save_of_the_same_key_is_not_the_new_one(desk: Desk) -> None:
    """Reservations are told apart by their generation, not by their key."""
    old = desk.room("a", step=1)
    desk.step_done(ENGINE, 1)
    new = desk.room("a", step=2)
    assert desk.saved(Saved([("a", old.generation)]), 0.0) == []
    entry = desk.pool.get("a")
    assert entry is not None
    assert entry.state is EntryState.SAVING
    assert desk.saved(Saved([("a", new.generation)]), 0.0) == ["a"]


def test_failed(desk: Desk) -> None:
    """The room is free again, and who waits is told in the writer's words."""
    place = desk.room("a")
    lost = desk.failed(SaveFailed("a", place.generation, "out of memory", "Traceback"))
    assert lost == [Lost("a", "out of memory", "Traceback")]
    assert desk.pool.usage().free == BLOCKS
    assert desk.counts["save_failed"] == 1


def test_failed_without_a_word(desk: Desk) -> None:
    """A failure is never taken for a save that was merely given up."""
    place = desk.room("a")
    (lost,) = desk.failed(SaveFailed("a", place.generation, ""))
    assert lost.message


def test_failure_of_an_older_reservation(desk: Desk) -> None:
    """It is no news for those who wait for the newer one."""
    old = desk.room("a", step=1)
    desk.pool.condemn("a", old.generation)
    new = desk.room("a", step=2)
    assert desk.failed(SaveFailed("a", old.generation, "broken")) == []
    assert desk.saved(Saved([("a", new.generation)]), 0.0) == ["a"]
    assert desk.failed(SaveFailed("never", 9, "broken")) == []


def test_step_done_frees_that_step_and_older(desk: Desk) -> None:
    """And nobody else's, and nothing that was saved."""
    desk.saved(Saved([("saved", desk.room("saved", step=1).generation)]), 0.0)
    for key, step in (("one", 1), ("two", 2), ("three", 3)):
        desk.room(key, step=step)
    desk.room("other's", step=1, owner=OTHER)
    lost = desk.step_done(ENGINE, 2)
    assert sorted(item.key for item in lost) == ["one", "two"]
    assert not any(item.message for item in lost)
    assert {key: desk.pool.get(key) is not None for key in ("saved", "three", "other's")} == {
        "saved": True,
        "three": True,
        "other's": True,
    }
    assert desk.counts["saves_given_up"] == 2


def test_owner_gone(desk: Desk) -> None:
    """All that it reserved is free; what it had saved stays."""
    desk.saved(Saved([("saved", desk.room("saved").generation)]), 0.0)
    for step in (1, 5):
        desk.room(f"step {step}", step=step)
    desk.room("other's", owner=OTHER)
    assert {item.key for item in desk.owner_gone(ENGINE)} == {"step 1", "step 5"}
    assert desk.owner_gone(ENGINE) == []
    assert desk.pool.usage().saving == 1
    assert desk.pool.get("saved") is not None


def test_giving_up_what_has_a_successor(desk: Desk) -> None:
    """Who waits for the key goes on waiting: a newer save of it is under way."""
    old = desk.room("a", step=1)
    desk.pool.condemn("a", old.generation)
    desk.room("a", step=2)
    assert desk.step_done(ENGINE, 1) == []
    assert desk.pool.usage().saving == 1
