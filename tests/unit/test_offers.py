# SPDX-License-Identifier: Apache-2.0
"""The producer side's bookkeeping: what is saved, what is published again, what is announced."""

from __future__ import annotations

from ec_connector.engine.offers import Offers
from ec_connector.protocol.local import ReservedItem

TOKEN = "r1"


def offers() -> Offers:
    return Offers("bfloat16", {"image": 8})


def settle(table: Offers, *answers: ReservedItem) -> tuple[list[str], list[str]]:
    done = table.settle(list(answers), TOKEN, "")
    return sorted(done.saves), sorted(done.republish)


def test_an_encoded_item_is_sized_reserved_and_offered() -> None:
    """Rows times measured width times element size is asked for, and then announced."""
    table = offers()
    table.encoded("a", 4, "image")
    (item,) = table.take()
    assert (item.key, item.nbytes, item.dtype, item.shape) == ("a", 64, "bfloat16", [4, 8])
    done = table.settle([ReservedItem("a", 3, [(5, 1)])], TOKEN, "")
    place = done.saves["a"]
    assert (place.generation, place.extents, place.token) == (3, [(5, 1)], TOKEN)
    offer = table.offer("a")
    assert offer is not None
    assert (offer.nbytes, offer.shape) == (64, (4, 8))


def test_a_held_item_is_offered_without_a_save() -> None:
    """What the pool has already is announced and not copied again."""
    table = offers()
    table.encoded("a", 4, "image")
    table.take()
    assert settle(table, ReservedItem("a", 3, held=True)) == ([], [])
    assert table.offer("a") is not None


def test_a_refused_item_is_not_offered_and_counted() -> None:
    """No room, or no width known, or an identifier of this process only: not announced."""
    table = offers()
    table.encoded("a", 4, "image")
    table.encoded("b", 4, "audio")
    table.encoded("renderer0-mm-1-image-0", 4, "image")
    assert [item.key for item in table.take()] == ["a"]
    done = table.settle([ReservedItem("a", refused="full")], TOKEN, "")
    reasons = {key: reason for key, (reason, _) in done.refused.items()}
    assert reasons == {
        "a": "no_room",
        "b": "no_width",
        "renderer0-mm-1-image-0": "request_local",
    }
    assert all(table.offer(key) is None for key in reasons)


def test_without_an_answer_nothing_is_offered() -> None:
    """A slow or dead agent withdraws even what was offered before."""
    table = offers()
    table.encoded("a", 4, "image")
    table.take()
    settle(table, ReservedItem("a", 3, [(5, 1)]))
    table.visited("a", 4, "image")
    table.take()
    done = table.settle(None, "", "agent_slow")
    assert done.refused == {"a": ("agent_slow", "")}
    assert table.offer("a") is None


def test_a_cached_item_is_asked_about_again_and_published_if_lost() -> None:
    """What the engine still has and the pool lost goes out again without an encode."""
    table = offers()
    table.encoded("a", 4, "image")
    table.take()
    settle(table, ReservedItem("a", 3, [(5, 1)]))
    table.visited("a", 4, "image")
    assert [item.key for item in table.take()] == ["a"]
    assert settle(table, ReservedItem("a", 4, [(9, 1)])) == ([], ["a"])


def test_an_item_that_left_the_encoder_cache_is_not_published_again() -> None:
    """Only what a worker has can be saved without encoding it."""
    table = offers()
    table.encoded("a", 4, "image")
    table.take()
    settle(table, ReservedItem("a", 3, [(5, 1)]))
    table.freed(["a"])
    table.visited("a", 4, "image")
    assert table.take() == []


def test_an_item_encoded_in_the_step_is_a_save() -> None:
    """A revisited item that is encoded afresh in the same step is saved once, as encoded."""
    table = offers()
    table.cached("a")
    table.visited("a", 4, "image")
    table.encoded("a", 4, "image")
    assert len(table.take()) == 1
    assert settle(table, ReservedItem("a", 3, [(5, 1)])) == (["a"], [])


def test_answers_for_other_items_are_ignored() -> None:
    """An answer that was not asked for offers nothing."""
    table = offers()
    table.take()
    assert settle(table, ReservedItem("x", 3, [(5, 1)])) == ([], [])
    assert table.offer("x") is None


def test_forget_withdraws_every_offer() -> None:
    """After new weights or the agent's death nothing is announced."""
    table = offers()
    table.pooled("a", 64, (4, 8))
    table.forget()
    assert table.offer("a") is None
