# SPDX-License-Identifier: Apache-2.0
"""A run of the benchmark as data: what ``--json`` prints and ``--against`` reads.

Times in seconds, sizes in bytes, rates in bytes a second, shares of one core
between 0 and 1.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ec_connector.bench.stats import Summary

SCHEMA = 1

MEMORY, ZMQ = "memory", "zmq"
IN_TREE, IN_TREE_TCP = "in-tree", "in-tree-tcp"
MEMCPY, BARE_ZMQ, PING_TCP, PING_IPC = "memcpy", "bare-zmq", "ping-tcp", "ping-ipc"
HIT, ASKED = "hit", "asked"

LABELS = {
    MEMORY: "ours, same-host memory",
    ZMQ: "ours, ZMQ over TCP",
    IN_TREE: "in-tree NIXL, UCX's choice",
    IN_TREE_TCP: "in-tree NIXL, TCP",
    MEMCPY: "limit: one memcpy",
    BARE_ZMQ: "limit: bare ZMQ over TCP",
    PING_TCP: "limit: bare round trip, TCP",
    PING_IPC: "limit: bare round trip, ipc",
    HIT: "stage: item in the pool already",
    ASKED: "stage: peer asked, nothing sent",
}
"""Every subject, in the order of tables and legends."""
OURS = (MEMORY, ZMQ)
THEIRS = (IN_TREE, IN_TREE_TCP)
LIMITS = (MEMCPY, BARE_ZMQ, PING_TCP, PING_IPC)


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One subject at one size. ``kind``: ``warm``, or ``first`` fetch from a new peer.

    ``inside`` is the median of what an agent of ours says of its own part: from
    the fetch's arrival there to usable bytes.
    """

    subject: str
    nbytes: int
    times: Summary
    kind: str = "warm"
    inside: float = 0.0


class CrowdCell(msgspec.Struct, frozen=True, kw_only=True):
    """Several consumers at once, each with ``depth`` fetches under way: one plane of ours.

    ``rate`` counts all consumers together. ``lost``: fetches that failed or
    brought wrong bytes.
    """

    plane: str
    nbytes: int
    consumers: int
    depth: int
    items: int
    times: Summary
    rate: float
    lost: int


class StepCell(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler's hooks take in one engine step, with so many requests waiting.

    ``arrival`` is the step in which all of them are new.
    """

    waiting: int
    images: int
    times: Summary
    arrival: float


class Facts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Single figures; None: not measured."""

    ack_bytes: int | None = None
    ack_bytes_worst: int | None = None
    ack_blocks: int | None = None
    in_tree_ack_bytes: int | None = None
    in_tree_ack_blocks: int | None = None
    idle_producer: float | None = None
    idle_consumer: float | None = None
    idle_wakeups: float | None = None
    in_tree_idle: float | None = None
    stopped: Summary | None = None
    in_tree_stopped: float | None = None
    in_tree_stopped_for: float | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where and beside what the run took place. ``load``: load average, before and after."""

    processor: str
    cores: int
    memory: int
    kernel: str
    python: str
    versions: dict[str, str]
    load: tuple[float, float]


class Run(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All of one run. ``notes``: what was left out, and why."""

    schema: int = 0
    started: str = ""
    seconds: float = 0.0
    command: str = ""
    machine: Machine | None = None
    cells: list[Cell] = []
    crowds: list[CrowdCell] = []
    steps: list[StepCell] = []
    facts: Facts = msgspec.field(default_factory=Facts)
    notes: list[str] = []

    def cell(self, subject: str, nbytes: int, kind: str = "warm") -> Cell | None:
        """The cell of a subject; None if it was not measured."""
        for cell in self.cells:
            if (cell.subject, cell.nbytes, cell.kind) == (subject, nbytes, kind):
                return cell
        return None

    def crowd(self, plane: str, nbytes: int, consumers: int, depth: int) -> CrowdCell | None:
        """The cell of so many consumers; None if it was not measured."""
        for cell in self.crowds:
            if (cell.plane, cell.nbytes, cell.consumers, cell.depth) == (
                plane,
                nbytes,
                consumers,
                depth,
            ):
                return cell
        return None

    def sizes(self) -> list[int]:
        """Sizes of transfers that were measured warm, ascending."""
        return sorted({cell.nbytes for cell in self.cells if cell.nbytes and cell.kind == "warm"})


class ResultsError(Exception):
    """A file holds no run that this version understands; the text says why."""


def to_json(run: Run) -> bytes:
    """One JSON object, indented."""
    return msgspec.json.format(msgspec.json.encode(run), indent=1)


def read(path: Path) -> Run:
    """The run in a file. Raises ResultsError."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError) as error:
        raise ResultsError(f"{path}: {error}") from error
    if run.schema != SCHEMA:
        raise ResultsError(f"{path}: schema {run.schema}; this version reads {SCHEMA}")
    return run


def show_size(nbytes: int) -> str:
    """A size as tables write it: ``4.7 MB``."""
    for digits, factor, unit in ((0, 1e8, "MB"), (0, 1e7, "MB"), (1, 1e6, "MB"), (2, 1e5, "MB")):
        if nbytes >= factor * 0.9995:
            return f"{nbytes / 1e6:.{digits}f} {unit}"
    return f"{nbytes / 1e3:.3g} kB"
