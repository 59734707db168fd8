# SPDX-License-Identifier: Apache-2.0
"""Draws the tables of states for docs/state-machines.md; run it after a table has changed.

python tools/draw_states.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ec_connector.agent.life import LIFE
from ec_connector.pool.entry import ENTRY
from ec_connector.protocol.fetch import FETCH
from ec_connector.protocol.grant import GRANT
from ec_connector.proxy.circuit import CIRCUIT
from ec_connector.states import Table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "state-machines.md"
DRAWN: list[tuple[Table[Any], str, str]] = [
    (ENTRY, "pool/entry.py", "What an entry of the pool holds its blocks for."),
    (GRANT, "protocol/grant.py", "A consumer's request, at the producer's agent."),
    (FETCH, "protocol/fetch.py", "An item on its way, at the consumer's agent."),
    (LIFE, "agent/life.py", "An engine's agent, as its engine sees it."),
    (CIRCUIT, "proxy/circuit.py", "A server behind the router."),
]


def drawn(table: Table[Any]) -> str:
    """A table as a Mermaid diagram; events between the same two states share an arrow."""
    lines = ["stateDiagram-v2", f"    [*] --> {table.start.name}"]
    states = list(type(table.start))
    lines += [f"    {state.name}: {state.name}<br>{state.value}" for state in states]
    for state in states:
        after: dict[str, list[str]] = {}
        for event, there in table.moves.get(state, {}).items():
            after.setdefault(there.name, []).append(event)
        lines += [f"    {state.name} --> {name}: {', '.join(e)}" for name, e in after.items()]
    lines += [f"    {state.name} --> [*]" for state in states if not table.moves.get(state)]
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    parts = [
        "# State machines\n",
        "Drawn from the tables that the code runs by (`python tools/draw_states.py`). What a table",
        "does not name is a bug and raises `InternalError`, with the story of the thing.\n",
    ]
    for table, file, text in DRAWN:
        parts += [f"## {table.name.capitalize()}\n", f"{text} Table: `ec_connector/{file}`.\n"]
        parts += ["```mermaid", drawn(table), "```\n"]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
