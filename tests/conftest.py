# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: the same examples each time, and nothing left behind.

A test that must leave something says so, with the reason::

    @pytest.mark.leaves("the engine is shared by all tests of this file")
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import settings

# The same examples on each run, and no time limit for one of them: a busy
# machine must not make a test fail. HYPOTHESIS_PROFILE=search looks for new ones.
settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=2000)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.load_profile(PROFILE)

# pyzmq's thread for frames that are not copied lives as long as its process. Here it begins before
# the first test, so that no test is blamed for it.
zmq.Frame(bytes(zmq.COPY_THRESHOLD), track=True, copy=False)

A_MOMENT = 5.0
"""Seconds in which what a test ended may still be going."""
SHM = Path("/dev/shm")
OF_OTHERS = ("psm_", "sem.", "torch_", "ucx_", "vllm")
"""Made by engines, and left by those that are killed: not by anything here."""
# Inherited by whatever a test starts, also by what outlives its parent.
RUN = f"PYTEST_LEAK_CHECK={secrets.token_hex(8)}".encode()
os.environ.update([RUN.decode().split("=")])
strangers: set[str] = set()
"""Processes of others, so that each is looked at once."""

Holdings = Counter[tuple[str, str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A search takes as long as it takes."""
    for item in items if PROFILE == "search" else ():
        item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(autouse=True)
def nothing_is_left(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Threads, descriptors, processes, mapped regions and shared memory go with their test."""
    marker = request.node.get_closest_marker("leaves")
    if marker is not None:
        if not any(isinstance(reason, str) and reason.strip() for reason in marker.args):
            pytest.fail('leaves() needs the reason: @pytest.mark.leaves("...")')
        yield
        return
    before = holdings()
    yield
    left = holdings() - before
    if left:
        for record in [*caplog.get_records("setup"), *caplog.get_records("call")]:
            # Exceptions that were logged hold the frames they came through.
            record.msg, record.args, record.exc_info = record.getMessage(), (), None
        gc.collect()
        until = time.monotonic() + A_MOMENT
        while (left := holdings() - before) and time.monotonic() < until:
            time.sleep(0.02)
    left -= Counter(what for what in left if what[0] == "shared memory" and held_by_others(what[1]))
    if left:
        lines = "\n".join(f"  {kind} {told(kind, name)}" for kind, name in sorted(left.elements()))
        pytest.fail(f"left behind:\n{lines}", pytrace=False)


def holdings() -> Holdings:
    """What this process, and those that it started, hold now: kind and name of each."""
    found: Holdings = Counter()
    found.update(("thread", str(one.ident)) for one in threading.enumerate())
    found.update(("descriptor", name) for name in descriptors())
    found.update(("process", pid) for pid in processes())
    found.update(("region", name) for name in mapped_regions())
    if SHM.is_dir():
        names = (name for name in os.listdir(SHM) if not name.startswith(OF_OTHERS))
        found.update(("shared memory", name) for name in names)
    return found


def descriptors() -> Iterator[str]:
    """Number and target of each open one."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            yield f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}"


def processes() -> set[str]:
    """Children, dead ones that nobody waited for too, and descendants whose parent is gone."""
    pids: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread that ended
            pids.update(Path(f"/proc/self/task/{task}/children").read_text().split())
    me = str(os.getpid())
    for pid in {name for name in os.listdir("/proc") if name.isdigit()} - strangers - pids - {me}:
        with contextlib.suppress(OSError):
            if RUN in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                pids.add(pid)
            else:
                strangers.add(pid)
    return pids


def told(kind: str, name: str) -> str:
    """A holding for the reader."""
    if kind == "thread":
        return next((str(one) for one in threading.enumerate() if str(one.ident) == name), name)
    if kind == "process":
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ")
            text = line.decode(errors="replace").strip()[:120]
            return f"{name} {text or '(ended, not waited for)'}"
    return name


def mapped_regions() -> Iterator[str]:
    """Memory without a name in a file system that is mapped here, by inode."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            fields = line.split()
            yield f"{fields[5]} inode {fields[4]}"


def held_by_others(name: str) -> bool:
    """Whether a process of somebody else has this file of shared memory, or had it just now."""
    path = SHM / name
    try:
        inode = f" {path.stat().st_ino} "  # it may be mapped under an earlier name
    except OSError:
        return True
    for pid in strangers:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            if any(str(SHM) in line and inode in line for line in maps):
                return True
            if any(fd.readlink() == path for fd in Path(f"/proc/{pid}/fd").iterdir()):
                return True
    return False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What hostile peers attempted in all of the run (tests/security), and how much got in."""
    made: Counter[str] = Counter()
    got_in: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                for name, value in report.user_properties:
                    if name == "attempt":
                        made[value[0]] += value[1]
                        got_in[value[0]] += value[2]
    if made:
        terminalreporter.section("hostile peers")
        for kind, count in sorted(made.items()):
            terminalreporter.line(f"{count:6}  {kind}, got in {got_in[kind]}")
        terminalreporter.line(f"attempts made {made.total()}, got in {got_in.total()}")
