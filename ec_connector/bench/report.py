# SPDX-License-Identifier: Apache-2.0
"""A run as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ec_connector.bench.results import LABELS, Run, show_size
from ec_connector.bench.verdict import judge


def show(console: Console, run: Run) -> None:
    """Every figure of a run, the targets last."""
    _transfers(console, run)
    _crowds(console, run)
    _steps(console, run)
    _targets(console, run)
    for note in run.notes:
        console.print(f"note: {note}")
    if run.machine is not None:
        machine = run.machine
        versions = ", ".join(f"{name} {text}" for name, text in machine.versions.items())
        console.print(
            f"{machine.processor}, {machine.cores} cores, Linux {machine.kernel}, "
            f"Python {machine.python}, {versions}; "
            f"load {machine.load[0]:.1f} before, {machine.load[1]:.1f} after; {run.seconds:.0f} s"
        )


def compare(console: Console, run: Run, earlier: Run) -> None:
    """Medians of two runs side by side."""
    table = Table(title="against the earlier run", title_justify="left")
    for name in ("what", "size", "earlier", "now", "now / earlier"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for cell in run.cells:
        before = earlier.cell(cell.subject, cell.nbytes, cell.kind)
        if before is not None:
            now, then = cell.times.median, before.times.median
            table.add_row(
                LABELS[cell.subject] + (", first" if cell.kind == "first" else ""),
                show_size(cell.nbytes) if cell.nbytes else "",
                _ms(then),
                _ms(now),
                f"{now / then:.2f}",
            )
    console.print(table)


def _transfers(console: Console, run: Run) -> None:
    table = Table(title="transfers (ms): median / p99", title_justify="left")
    table.add_column("")
    sizes = run.sizes()
    for nbytes in sizes:
        table.add_column(show_size(nbytes), justify="right")
    table.add_column("first", justify="right")
    table.add_column("no payload", justify="right")
    for subject, label in LABELS.items():
        cells = [run.cell(subject, nbytes) for nbytes in sizes]
        firsts = [c for c in run.cells if c.subject == subject and c.kind == "first"]
        shown = [*cells, firsts[0] if firsts else None, run.cell(subject, 0)]
        if any(shown):
            texts = [f"{_ms(c.times.median)} / {_ms(c.times.p99)}" if c else "" for c in shown]
            table.add_row(label, *texts)
    console.print(table)


def _crowds(console: Console, run: Run) -> None:
    if not run.crowds:
        return
    table = Table(title="many consumers, items of 1 MB", title_justify="left")
    for name in ("plane", "consumers", "each", "at once", "GB/s", "median ms", "p99 ms", "lost"):
        table.add_column(name, justify="left" if name == "plane" else "right")
    for cell in run.crowds:
        table.add_row(
            cell.plane,
            str(cell.consumers),
            str(cell.items),
            str(cell.depth),
            f"{cell.rate / 1e9:.2f}",
            _ms(cell.times.median),
            _ms(cell.times.p99),
            str(cell.lost),
        )
    console.print(table)


def _steps(console: Console, run: Run) -> None:
    if not run.steps:
        return
    table = Table(title="scheduler hooks of one engine step (ms)", title_justify="left")
    for name in ("requests waiting", "images each", "median", "p99", "their first step"):
        table.add_column(name, justify="right")
    for cell in run.steps:
        table.add_row(
            str(cell.waiting),
            str(cell.images),
            _ms(cell.times.median),
            _ms(cell.times.p99),
            _ms(cell.arrival),
        )
    console.print(table)


def _targets(console: Console, run: Run) -> None:
    table = Table(title="targets", title_justify="left")
    for name in ("target", "ours", "in-tree", "limit", "ratio", "must", "aim"):
        table.add_column(name, justify="left" if name == "target" else "right")
    for row in judge(run):
        table.add_row(row.what, row.ours, row.theirs, row.limit, row.ratio, row.must, row.aim)
    console.print(table)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
