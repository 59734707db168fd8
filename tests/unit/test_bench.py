# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic, verdicts and output. How fast anything is, is not tested here."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ec_connector.bench import app, report
from ec_connector.bench.crowd import crowd
from ec_connector.bench.plan import FULL, MAIN, QUICK, SMALL
from ec_connector.bench.results import (
    BARE_ZMQ,
    IN_TREE,
    IN_TREE_TCP,
    LABELS,
    MEMCPY,
    MEMORY,
    PING_TCP,
    SCHEMA,
    ZMQ,
    Cell,
    CrowdCell,
    Facts,
    ResultsError,
    Run,
    StepCell,
    read,
    show_size,
    to_json,
)
from ec_connector.bench.stats import Summary, median, quantile, summarize
from ec_connector.bench.steps import steps
from ec_connector.bench.turns import by_turns
from ec_connector.bench.verdict import FAILS, HOLDS, UNKNOWN, judge


def took(milliseconds: float, p99: float = 0.0) -> Summary:
    """A summary with this median."""
    value = milliseconds / 1e3
    return Summary(100, value, value, value, value, (p99 or milliseconds) / 1e3, value)


def a_run(**change: float) -> Run:
    """A run in which every target holds, but for what is changed (ms)."""
    ms = {
        MEMORY: 0.7, ZMQ: 1.1, IN_TREE: 2.2, IN_TREE_TCP: 20.0, MEMCPY: 0.35, BARE_ZMQ: 1.0,
    } | change  # fmt: skip
    cells = [Cell(subject=name, nbytes=MAIN, times=took(ms[name])) for name in ms if name in LABELS]
    cells += [
        Cell(subject=MEMORY, nbytes=SMALL, times=took(0.2)),
        Cell(subject=IN_TREE, nbytes=SMALL, times=took(0.6)),
        Cell(subject=PING_TCP, nbytes=0, times=took(0.1)),
        Cell(subject=MEMORY, nbytes=MAIN, times=took(3.0), kind="first"),
        Cell(subject=ZMQ, nbytes=MAIN, times=took(4.0), kind="first"),
        Cell(subject=IN_TREE, nbytes=MAIN, times=took(60.0), kind="first"),
    ]
    crowds = [
        CrowdCell(plane=plane, nbytes=10**6, consumers=number, depth=4, items=9, times=took(1),
                  rate=rate, lost=0)
        for plane in (MEMORY, ZMQ) for number, rate in ((1, 14e9), (64, 14e9))
    ]  # fmt: skip
    facts = Facts(
        ack_bytes_worst=500,
        in_tree_ack_bytes=229_000,
        idle_producer=0.0,
        idle_consumer=0.0,
        idle_wakeups=0.0,
        stopped=took(1.0),
    )
    waiting = [StepCell(waiting=500, images=8, times=took(0.1), arrival=0.01)]
    return Run(schema=SCHEMA, cells=cells, crowds=crowds, steps=waiting, facts=facts)


def test_everything_holds() -> None:
    """The p99 rows compare with the in-tree median here, as all values of a summary are alike."""
    rows = {row.what: row for row in judge(a_run())}
    failing = [what for what, row in rows.items() if FAILS in (row.must, row.aim)]
    assert [what for what in failing if not what.startswith("p99 at 4.7 MB, ZMQ")] == []


@pytest.mark.parametrize(
    ("change", "begins", "must", "aim"),
    [
        ({MEMORY: 1.5}, "4.7 MB, same-host", FAILS, FAILS),
        ({MEMORY: 1.0}, "4.7 MB, same-host", HOLDS, FAILS),
        ({ZMQ: 2.6}, "4.7 MB, ZMQ", FAILS, FAILS),
        ({ZMQ: 1.2}, "4.7 MB, ZMQ", HOLDS, FAILS),
    ],
)
def test_verdicts(change: dict[str, float], begins: str, must: str, aim: str) -> None:
    """A figure on the wrong side of a target is said to be."""
    (row,) = [row for row in judge(a_run(**change)) if row.what.startswith(begins)]
    assert (row.must, row.aim) == (must, aim)


def test_what_was_not_measured_is_not_judged() -> None:
    """Without the in-tree pair nothing is said to hold."""
    rows = judge(Run(schema=SCHEMA))
    assert {row.must for row in rows} == {UNKNOWN}
    assert {row.aim for row in rows} == {UNKNOWN}


def test_a_loss_fails() -> None:
    """However fast it was."""
    run = a_run()
    run.crowds = [
        cell if cell.consumers == 1 else CrowdCell(**{f: getattr(cell, f) for f in
                                                      cell.__struct_fields__} | {"lost": 1})
        for cell in run.crowds
    ]  # fmt: skip
    crowds = [row for row in judge(run) if "consumers at once" in row.what]
    assert [row.must for row in crowds] == [FAILS, FAILS]


def test_statistics() -> None:
    """Medians and quantiles of few values."""
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0]) == 2.5
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.25) == 1.0
    summary = summarize([float(number) for number in range(1, 201)])
    assert (summary.n, summary.low, summary.p99, summary.high) == (200, 1.0, 198.0, 200.0)
    with pytest.raises(ValueError, match="no values"):
        median([])


def test_turns_are_shared() -> None:
    """Each subject has its count, another begins each round, and a slow one is cut short."""
    order: list[str] = []

    class Subject:
        def __init__(self, name: str, seconds: float) -> None:
            self.name, self.seconds = name, seconds

        def turn(self, count: int, uncounted: int) -> list[float]:
            order.append(self.name)
            return [self.seconds] * count

    times = by_turns([Subject("a", 1.0), Subject("b", 50.0)], 6, 2, 60.0, 0, lambda _: None)
    assert (len(times["a"]), len(times["b"])) == (6, 2)
    assert order == ["a", "b", "a", "a"]


def test_sizes_are_whole_rows_and_shown_plainly() -> None:
    """Sizes as tables write them."""
    assert [show_size(size.nbytes) for size in FULL.sizes] == [
        "0.13 MB", "1.0 MB", "4.7 MB", "47 MB", "472 MB",
    ]  # fmt: skip
    assert {size.nbytes for size in QUICK.sizes} <= {size.nbytes for size in FULL.sizes}


def test_a_run_survives_a_file(tmp_path: Path) -> None:
    """What --json writes is what --against reads."""
    file = tmp_path / "run.json"
    file.write_bytes(to_json(a_run()))
    assert to_json(read(file)) == to_json(a_run())
    json.loads(file.read_bytes())
    for text in ("{", '{"schema": 99}'):
        file.write_text(text)
        with pytest.raises(ResultsError, match=str(file)):
            read(file)


def test_tables() -> None:
    """Every figure is in some table, and two runs can be set side by side."""
    out = io.StringIO()
    console = Console(file=out, width=200)
    report.show(console, a_run())
    report.compare(console, a_run(), a_run(memory=1.4))
    text = out.getvalue()
    for words in ("0.7", "229000 bytes", "500", "0.50", LABELS[BARE_ZMQ]):
        assert words in text


def test_wrong_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A file that is no run is named, before anything is measured."""
    assert app.main(["--against", str(tmp_path / "none.json")]) == app.USAGE
    assert "none.json" in capsys.readouterr().err


def test_files_that_cannot_be_written_are_known_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slip in --json or --plot costs no minutes of measuring."""
    monkeypatch.setattr(app, "measure", lambda *_: pytest.fail("it was measured first"))
    for option in ("--json", "--plot"):
        for path in (tmp_path, tmp_path / "none" / "run.json"):
            assert app.main(["--quick", option, str(path)]) == app.USAGE
            assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("plane", [MEMORY, ZMQ])
def test_crowd(plane: str) -> None:
    """Real agents: nothing is lost, and every item came by the plane in question."""
    cell = crowd(plane, consumers=2, items=6, depth=2, extra={})
    assert (cell.lost, cell.times.n) == (0, 12)


def test_steps() -> None:
    """Real agent: requests whose images cannot be had yet stay waiting."""
    cell = steps(waiting=3, images=2, count=5)
    assert (cell.waiting, cell.images, cell.times.n) == (3, 2, 5)
