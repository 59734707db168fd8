# SPDX-License-Identifier: Apache-2.0
"""The screen of ``ec-connector top``: what the agents of this host move, for whom and how fast."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ec_connector.cli.tables import duration, share
from ec_connector.protocol.account import PACKING, STAGES
from ec_connector.protocol.local import PeerSums, State, Transfer
from ec_connector.protocol.texts import harmless

_LATEST = 8
_WAITS = (
    ("waiting for saves", "parked_now"),
    ("waiting for room", "waiting_for_room"),
    ("fetching", "fetching"),
    ("granted", "grants"),
)


def screen(states: list[State], before: dict[int, State], seconds: float) -> RenderableType:
    """All agents. ``before``: by process what each said ``seconds`` ago, for the rates."""
    if not states:
        return Text("no agent of this user runs on this host")
    parts: list[RenderableType] = []
    for state in states:
        parts += [_headline(state), *_peers(state, before.get(state.agent_pid), seconds)]
        parts += [*_reasons(state), *_latest(state.transfers), Text("")]
    return Group(*parts)


def _headline(state: State) -> Text:
    values = state.values
    blocks = values.get("blocks", 0)
    used = blocks - values.get("blocks_free", 0)
    waits = ", ".join(f"{name} {values.get(key, 0)}" for name, key in _WAITS)
    text = Text(f"agent {state.agent_pid} at {state.address}", style="bold")
    text.append(
        f"\npool {share(used, blocks)} of {blocks} blocks, {values.get('entries', 0)} items, "
        f"pinned {values.get('blocks_pinned', 0)} blocks; {waits}",
        style="not bold",
    )
    return text


def _peers(state: State, before: State | None, seconds: float) -> Iterable[RenderableType]:
    if not state.peers:
        return
    earlier = {(sums.peer, sums.role): sums for sums in before.peers} if before else {}
    table = Table("peer", "it is", "link", "plane", "transfers", "failed", "in", "out", box=None)
    for column in ("in/s", "out/s", "mean time"):
        table.add_column(column)
    for sums in reversed(state.peers):  # the one heard of last on top
        was = earlier.get((sums.peer, sums.role)) or PeerSums(sums.peer, sums.role, sums.link)
        known = before is not None and seconds > 0
        rates = ((sums.bytes_in - was.bytes_in), (sums.bytes_out - was.bytes_out))
        table.add_row(
            harmless(sums.peer) or "?",
            "producer" if sums.role == "consumer" else "consumer",
            sums.link,
            sums.plane,
            str(sums.transfers),
            str(sums.failed),
            decimal(sums.bytes_in),
            decimal(sums.bytes_out),
            *(decimal(int(rate / seconds)) if known else "" for rate in rates),
            duration(sums.seconds / sums.transfers) if sums.transfers else "",
        )
    yield table


def _reasons(state: State) -> Iterable[RenderableType]:
    for name, counts in sorted(state.reasons.items()):
        words = ", ".join(f"{reason} {number}" for reason, number in sorted(counts.items()))
        yield Text(f"{name.replace('_', ' ')}: {words}")


def _latest(transfers: list[Transfer]) -> Iterable[RenderableType]:
    if not transfers:
        return
    stages = [stage for stage in STAGES if stage != PACKING]
    table = Table("latest", "peer", "plane", "codec", "item", "bytes", "outcome", box=None)
    for column in (*stages, PACKING, "total"):
        table.add_column(column)
    for one in transfers[-_LATEST:]:
        table.add_row(
            f"#{one.number}",
            harmless(one.peer) or "?",
            one.plane,
            one.codec,
            harmless(one.item[:16]),
            decimal(one.payload_in + one.payload_out),
            one.outcome,
            *(duration(one.seconds[s]) if s in one.seconds else "" for s in (*stages, PACKING)),
            duration(one.total),
        )
    yield table
