# SPDX-License-Identifier: Apache-2.0
"""The tables of states: whole, reachable, enforced, and drawn as they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ec_connector.agent.life import LIFE
from ec_connector.errors import InternalError
from ec_connector.pool.entry import ENTRY
from ec_connector.protocol.fetch import FETCH
from ec_connector.protocol.grant import GRANT
from ec_connector.proxy.circuit import CIRCUIT
from ec_connector.states import Table

ROOT = Path(__file__).resolve().parents[2]
TABLES = pytest.mark.parametrize(
    "table", [ENTRY, GRANT, FETCH, LIFE, CIRCUIT], ids=lambda table: table.name
)


@TABLES
def test_every_state_is_reached_and_left(table: Table[Any]) -> None:
    """From the start to each state, and from each to the end."""
    reached, new = set(), {table.start}
    while new:
        reached |= new
        new = {there for state in new for there in table.moves.get(state, {}).values()} - reached
    assert reached == set(type(table.start))
    (end,) = [state for state in reached if not table.moves.get(state)]
    ends = {end}
    while more := {s for s in reached - ends if set(table.moves[s].values()) & ends}:
        ends |= more
    assert ends == reached


@TABLES
def test_what_is_not_in_the_table_is_refused(table: Table[Any]) -> None:
    """For each state and event: the move of the table, or an error with the thing's story."""
    events = {event for moves in table.moves.values() for event in moves}
    for state in type(table.start):
        for event in events | {"nonsense"}:
            there = table.moves.get(state, {}).get(event)
            if there is not None:
                assert table.after(state, event, "k") is there
                continue
            with pytest.raises(InternalError) as caught:
                table.after(state, event, "k", lambda: "its story")
            for part in (table.name, "'k'", repr(event), repr(state.value), "its story"):
                assert part in str(caught.value)


def test_page_is_drawn_from_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/state-machines.md shows what the code does."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    sys.modules.pop("draw_states", None)
    import draw_states

    assert draw_states.PAGE.read_text() == draw_states.page()
