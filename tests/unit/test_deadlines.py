# SPDX-License-Identifier: Apache-2.0
"""Many deadlines: each comes once, in order, and memory follows the live ones."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from ec_connector.protocol.deadlines import Deadlines

KEYS = st.sampled_from("abcd")
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 20)),
        st.tuples(st.just("cancel"), KEYS, st.just(0)),
        st.tuples(st.just("due"), st.just(""), st.integers(0, 20)),
    ),
    max_size=200,
)


def test_soonest_first_and_once() -> None:
    """What is due comes in the order of its time, and never again."""
    deadlines: Deadlines[str] = Deadlines()
    for key, when in (("late", 3.0), ("soon", 1.0), ("middle", 2.0)):
        deadlines.set(key, when)
    assert deadlines.next() == 1.0
    assert deadlines.due(2.0) == ["soon", "middle"]
    assert deadlines.due(2.0) == []
    assert deadlines.next() == 3.0
    assert len(deadlines) == 1


def test_on_time_is_due() -> None:
    """A deadline has come at its very moment, not just after it."""
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    assert deadlines.due(0.999) == []
    assert deadlines.due(1.0) == ["a"]


def test_moved_and_cancelled() -> None:
    """Only the last word about a key counts, whether it became sooner or later."""
    deadlines: Deadlines[str] = Deadlines()
    for key in "abc":
        deadlines.set(key, 5.0)
    deadlines.set("a", 9.0)
    deadlines.set("b", 1.0)
    deadlines.cancel("c")
    deadlines.cancel("never known")
    assert deadlines.due(5.0) == ["b"]
    assert deadlines.due(9.0) == ["a"]
    assert deadlines.next() is None


def test_keys_are_never_compared() -> None:
    """Two keys of one moment need no order among themselves."""
    deadlines: Deadlines[object] = Deadlines()
    one, other = object(), object()
    deadlines.set(one, 1.0)
    deadlines.set(other, 1.0)
    assert deadlines.due(1.0) == [one, other]


def test_memory_follows_the_live_ones() -> None:
    """A deadline that is moved a million times does not leave a million behind."""
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("other", 0.5)
    for turn in range(10_000):
        deadlines.set("a", float(turn))
        assert len(deadlines._heap) <= 64 + 2 * 2 + 1
    assert deadlines.next() == 0.5
    assert deadlines.due(9_999.0) == ["other", "a"]


@given(MOVES)
def test_as_a_plain_dictionary_would(moves: list[tuple[str, str, int]]) -> None:
    """The same answers as from a table that is searched from end to end."""
    deadlines: Deadlines[str] = Deadlines()
    table: dict[str, float] = {}
    for what, key, when in moves:
        if what == "set":
            deadlines.set(key, when)
            table[key] = when
        elif what == "cancel":
            deadlines.cancel(key)
            table.pop(key, None)
        else:
            due = deadlines.due(when)
            assert sorted(due) == sorted(key for key, at in table.items() if at <= when)
            assert [table[key] for key in due] == sorted(table[key] for key in due)
            table = {key: at for key, at in table.items() if at > when}
        assert deadlines.next() == min(table.values(), default=None)
        assert len(deadlines) == len(table)
