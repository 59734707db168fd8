# SPDX-License-Identifier: Apache-2.0
"""The command ``ec-connector bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ec_connector.bench.ours import BenchError
from ec_connector.bench.plan import FULL, QUICK
from ec_connector.bench.plot import plot
from ec_connector.bench.report import compare, show
from ec_connector.bench.results import ResultsError, read, to_json
from ec_connector.bench.run import measure
from ec_connector.bench.verdict import FAILS, judge

GOOD, PROBLEM, USAGE = 0, 1, 2
_WIDTH = 150


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write what was asked for; the exit status.

    1 when a target that must hold does not, or something could not be measured.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["compare"]:
        from ec_connector.bench import compare as comparing

        return comparing.main(words[1:])
    options = _options(words)
    console = Console(stderr=options.json == "-", markup=False, highlight=False)
    console.width = max(console.width, _WIDTH)
    progress = Console(stderr=True, markup=False, highlight=False)
    earlier = None
    if options.against:
        try:
            earlier = read(options.against)
        except ResultsError as error:
            print(error, file=sys.stderr)
            return USAGE
    if fault := _unwritable(options):  # known now, not after minutes
        print(fault, file=sys.stderr)
        return USAGE
    with progress.status("starting") as status:
        try:
            run = measure(
                QUICK if options.quick else FULL,
                {},
                lambda what: status.update(f"measuring: {what}"),
                " ".join(["ec-connector", "bench", *words]),
            )
        except BenchError as error:
            print(error, file=sys.stderr)
            return PROBLEM
    show(console, run)
    if earlier is not None:
        compare(console, run, earlier)
    if options.json == "-":
        print(to_json(run).decode())
    elif options.json:
        Path(options.json).write_bytes(to_json(run))
    if options.plot:
        try:
            plot(run, options.plot)
        except ImportError as error:
            print(f"no plot: {error}: pip install 'ec-connector[bench]'", file=sys.stderr)
            return PROBLEM
        except ValueError as error:
            print(f"no plot: {error}", file=sys.stderr)
            return USAGE
    return PROBLEM if any(row.must == FAILS for row in judge(run)) else GOOD


def _unwritable(options: Any) -> str:
    """Why a file that was asked for cannot be written; empty when none is known."""
    for name, path in (("--json", options.json), ("--plot", options.plot)):
        if path in (None, "", "-"):
            continue
        if Path(path).is_dir():
            return f"{name} {path} is a directory; name a file"
        if not Path(path).absolute().parent.is_dir():
            return f"{name} {path}: there is no directory {Path(path).parent}; make it first"
    return ""


def _options(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        prog="ec-connector bench",
        description="Measure transfers here, by turns with vLLM's in-tree pair (where vllm and "
        "nixl are installed) and with what the machine can do. 'bench compare' is another "
        "command: is pulling an encoding quicker than making it again?",
    )
    parser.add_argument("--quick", action="store_true", help="two sizes, half a minute")
    parser.add_argument("--json", metavar="FILE", default="", help="write the run; -: print it")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw it (PNG or SVG)")
    parser.add_argument("--against", metavar="FILE", type=Path, help="compare with this run")
    return parser.parse_args(argv)
