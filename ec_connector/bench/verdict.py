# SPDX-License-Identifier: Apache-2.0
"""The targets of speed, each judged from one run: what must hold, and what is aimed at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ec_connector.bench.plan import MAIN, ONE, SMALL
from ec_connector.bench.results import (
    BARE_ZMQ,
    IN_TREE,
    IN_TREE_TCP,
    MEMCPY,
    MEMORY,
    PING_TCP,
    ZMQ,
    Cell,
    Run,
)

HOLDS, FAILS, UNKNOWN = "yes", "no", "-"


@dataclass(frozen=True)
class Row:
    """One target. Texts are for people; ``must`` and ``aim`` are HOLDS, FAILS or UNKNOWN."""

    what: str
    ours: str
    theirs: str
    limit: str
    ratio: str
    must: str
    aim: str


def judge(run: Run) -> list[Row]:
    """Every target, in the order of the table in docs/performance.md."""
    return list(_rows(run))


def _rows(run: Run) -> Iterator[Row]:
    memory, zmq = run.cell(MEMORY, MAIN), run.cell(ZMQ, MAIN)
    fastest = _fastest(run, MAIN)
    yield _row(
        "4.7 MB, same-host plane: 1.5x in-tree; aim 1.3x one memcpy + 0.3 ms",
        memory,
        fastest,
        run.cell(MEMCPY, MAIN),
        lambda ours, theirs: theirs >= 1.5 * ours,
        lambda ours, limit: ours <= 1.3 * limit + 0.3e-3,
    )
    yield _row(
        "4.7 MB, ZMQ over TCP: 8x in-tree over TCP; aim 0.9 of bare ZMQ",
        zmq,
        run.cell(IN_TREE_TCP, MAIN),
        run.cell(BARE_ZMQ, MAIN),
        lambda ours, theirs: theirs >= 8 * ours,
        lambda ours, limit: limit >= 0.9 * ours,
    )
    yield _row(
        "0.13 MB, same-host plane: 1.3x in-tree; aim 2x a bare round trip",
        run.cell(MEMORY, SMALL),
        _fastest(run, SMALL),
        run.cell(PING_TCP, 0),
        lambda ours, theirs: theirs >= 1.3 * ours,
        lambda ours, limit: ours <= 2 * limit,
    )
    for name, cell in (("same-host plane", memory), ("ZMQ over TCP", zmq)):
        yield _p99(name, cell, fastest)
    for name, plane in (("same-host plane", MEMORY), ("ZMQ over TCP", ZMQ)):
        yield _row(
            f"first fetch from a new peer, {name}: 10x in-tree; aim 5 ms",
            run.cell(plane, MAIN, "first"),
            _fastest(run, MAIN, "first"),
            None,
            lambda ours, theirs: theirs >= 10 * ours,
            None,
            aim_seconds=5e-3,
        )
    for plane in (MEMORY, ZMQ):
        yield _crowd(run, plane)
    yield from _facts(run)


def _row(
    what: str,
    ours: Cell | None,
    theirs: Cell | None,
    limit: Cell | None,
    must: Callable[[float, float], bool],
    aim: Callable[[float, float], bool] | None,
    aim_seconds: float = 0.0,
) -> Row:
    mine, other, best = (cell.times.median if cell else None for cell in (ours, theirs, limit))
    aimed = UNKNOWN
    if mine is not None and aim is not None and best is not None:
        aimed = _say(aim(mine, best))
    elif mine is not None and aim_seconds:
        aimed = _say(mine <= aim_seconds)
    both = mine is not None and other is not None
    return Row(
        what,
        _ms(mine),
        _ms(other),
        _ms(best),
        f"{other / mine:.1f}x" if mine and other else "-",
        _say(must(mine, other)) if both and mine is not None and other is not None else UNKNOWN,
        aimed,
    )


def _p99(name: str, ours: Cell | None, theirs: Cell | None) -> Row:
    what = f"p99 at 4.7 MB, {name}: a third of in-tree's; aim 2x our median"
    if ours is None:
        return Row(what, "-", "-", "-", "-", UNKNOWN, UNKNOWN)
    mine, other = ours.times.p99, theirs.times.p99 if theirs else None
    return Row(
        what,
        _ms(mine),
        _ms(other),
        _ms(2 * ours.times.median),
        f"{other / mine:.1f}x" if other else "-",
        _say(other >= 3 * mine) if other else UNKNOWN,
        _say(mine <= 2 * ours.times.median),
    )


def _crowd(run: Run, plane: str) -> Row:
    many = max((cell.consumers for cell in run.crowds if cell.plane == plane), default=0)
    cells = {cell.consumers: cell for cell in run.crowds if cell.plane == plane}
    what = f"{many} consumers at once, {plane}: nothing lost, rate within 20 % of one's"
    if many < 2 or 1 not in cells:
        return Row(what, "-", "-", "-", "-", UNKNOWN, UNKNOWN)
    alone, crowd = cells[1], cells[many]
    copy = run.cell(MEMCPY, ONE) or run.cell(MEMCPY, MAIN)
    best = copy.nbytes / copy.times.median if copy else None
    return Row(
        what,
        f"{crowd.rate / 1e9:.2f} GB/s, {crowd.lost} lost",
        f"one: {alone.rate / 1e9:.2f} GB/s",
        f"{best / 1e9:.1f} GB/s" if best else "-",
        f"{crowd.rate / alone.rate:.2f}",
        _say(crowd.lost == 0 and crowd.rate >= 0.8 * alone.rate),
        _say(crowd.rate >= best) if best else UNKNOWN,
    )


def _facts(run: Run) -> Iterator[Row]:
    facts = run.facts
    worst, theirs = facts.ack_bytes_worst, facts.in_tree_ack_bytes
    yield Row(
        "ack size: below 1 KiB at any pool size",
        f"{worst} bytes" if worst else "-",
        f"{theirs} bytes" if theirs else "-",
        "-",
        f"{theirs / worst:.0f}x" if theirs and worst else "-",
        _say(worst < 1024) if worst else UNKNOWN,
        UNKNOWN,
    )
    idle = facts.idle_producer, facts.idle_consumer
    most = max(share for share in idle if share is not None) if None not in idle else None
    yield Row(
        "agent at rest: below 1 % of a core; aim no wake-ups",
        f"{most:.2%}, {facts.idle_wakeups:.1f} wake-ups/s" if most is not None else "-",
        f"{facts.in_tree_idle:.0%}" if facts.in_tree_idle is not None else "-",
        "-",
        "-",
        _say(most < 0.01) if most is not None else UNKNOWN,
        _say(facts.idle_wakeups == 0) if facts.idle_wakeups is not None else UNKNOWN,
    )
    loaded = [cell for cell in run.steps if cell.waiting >= 500]
    slowest = max((cell.times.median for cell in loaded), default=None)
    yield Row(
        "hooks of one engine step with 500 requests waiting: below 1 ms",
        _ms(slowest),
        "-",
        "-",
        "-",
        _say(slowest < 1e-3) if slowest is not None else UNKNOWN,
        UNKNOWN,
    )
    stopped = facts.stopped.median if facts.stopped else None
    yield Row(
        "fetch while the producer's engine is in a long step: milliseconds",
        _ms(stopped),
        _ms(facts.in_tree_stopped),
        "-",
        f"{facts.in_tree_stopped / stopped:.0f}x" if facts.in_tree_stopped and stopped else "-",
        _say(stopped < 10e-3) if stopped is not None else UNKNOWN,
        UNKNOWN,
    )


def _fastest(run: Run, nbytes: int, kind: str = "warm") -> Cell | None:
    """The in-tree pair over whatever transport was faster here."""
    cells = [cell for name in (IN_TREE, IN_TREE_TCP) if (cell := run.cell(name, nbytes, kind))]
    return min(cells, key=lambda cell: cell.times.median, default=None)


def _say(holds: bool) -> str:
    return HOLDS if holds else FAILS


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3g} ms"
