# SPDX-License-Identifier: Apache-2.0
"""The arithmetic and the table of ``bench/first_token.py``. How fast anything is, is not tested."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("PIL")
from rich.console import Console

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "first_token.py"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("bench_first_token", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_line_is_median_and_p90(script: Any) -> None:
    """In milliseconds; the parts only where they are known, and equal tokens counted."""
    like = [script.Taken(0.0, (1, 2))] * 10
    taken = [script.Taken(n / 10, (1, 2) if n < 10 else (1, 3)) for n in range(1, 11)]
    line = script.row("here", "one", 8, taken, like)
    assert (line.n, line.median_ms, line.p90_ms, line.same) == (10, 550.0, 900.0, 9)
    assert (line.encode_ms, line.decode_ms) == (None, None)
    parts = [script.Taken(0.3, (1, 2), 0.2, 0.1)] * 10
    line = script.row("here", "hand", 8, parts, like)
    assert (line.encode_ms, line.decode_ms) == (200.0, 100.0)


def test_each_way_begins_in_turn(script: Any) -> None:
    """So that none always follows the same other."""
    assert [script.order("abc", turn) for turn in range(4)] == [
        list("abc"), list("bca"), list("cab"), list("abc"),
    ]  # fmt: skip


def test_the_table_says_what_was_measured(script: Any) -> None:
    """And leaves empty what was not."""
    rows = [
        script.Row("same host", "one vLLM", 1, 10, 218.4, 249.0, 10),
        script.Row("same host", "pair without router", 1, 10, 235.2, 247.0, 9, 201.1, 34.3),
    ]
    out = io.StringIO()
    Console(file=out, width=110).print(script.table(rows))
    first, second = [line for line in out.getvalue().splitlines() if "same host" in line]
    assert "218" in first
    assert "10 of 10" in first
    assert "201" in second
    assert "9 of 10" in second


def test_without_root_there_is_no_link(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the reason is said."""
    monkeypatch.setattr(script.os, "geteuid", lambda: 1)
    assert "root" in script.no_link()
