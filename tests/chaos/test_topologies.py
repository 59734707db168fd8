# SPDX-License-Identifier: Apache-2.0
"""More than two engines, and engines whose clocks have nothing in common."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time

import pytest

from tests.chaos.world import DEADLINE, GRACE, MIB, SOON, Side, World, note

pytestmark = pytest.mark.chaos

YEAR = 365 * 24 * 3600


@pytest.mark.parametrize("plane", ["memory", "zmq"])
def test_two_producers_and_two_consumers(plane: str) -> None:
    """Each loads from each. One producer stops: what the other has goes on, and it comes back."""
    with contextlib.ExitStack() as stack:
        worlds = {name: stack.enter_context(World(planes=[plane])) for name in ("one", "two")}

        def item(source: str, name: str, nbytes: int) -> dict[str, object]:
            world = worlds[source]
            return world.through_relay(world.producer.put(f"{name} of {source}", nbytes))

        def ends(items: dict[str, dict[str, object]], seconds: float) -> dict[str, list[str]]:
            """How it went with each source's item, at both consumers, asked for at one time."""
            asked = [
                (source, world, world.fetch(wanted, seconds))
                for source, wanted in items.items()
                for world in worlds.values()
            ]
            found: dict[str, list[str]] = {source: [] for source in items}
            for source, world, key in asked:
                end = world.ended(key, seconds + GRACE)
                found[source].append(end.get("reason", end["end"]))
            return found

        small = {source: item(source, "small", MIB) for source in worlds}
        assert ends(small, DEADLINE) == {"one": ["ready"] * 2, "two": ["ready"] * 2}
        large = {source: item(source, "large", 4 * MIB) for source in worlds}
        worlds["one"].strike("producer", "agent", signal.SIGSTOP)
        found = ends(large, SOON)
        assert found["two"] == ["ready"] * 2
        assert set(found["one"]) <= {"deadline", "peer_unreachable"}
        worlds["one"].strike("producer", "agent", signal.SIGKILL)
        worlds["one"].recover(worlds["one"].producer, "agent")
        for world in worlds.values():
            world.settle()
        again = {source: item(source, "again", MIB) for source in worlds}
        assert ends(again, DEADLINE) == {"one": ["ready"] * 2, "two": ["ready"] * 2}
        for world in worlds.values():
            world.settle()


@pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("unshare") is None
    or not os.path.exists("/proc/self/ns/time"),
    reason="a clock of its own needs root, unshare and a kernel with time namespaces",
)
@pytest.mark.parametrize("plane", ["memory", "zmq"])
@pytest.mark.parametrize("ahead", ["producer", "consumer"])
def test_a_clock_a_year_ahead(ahead: str, plane: str) -> None:
    """As of a host that has been up for longer: times of two sides are never compared."""
    elsewhere = ("unshare", "--time", "--fork", "--kill-child", f"--monotonic={YEAR}")
    sides = [
        Side(name, elsewhere if name == ahead else (), planes=[plane])
        for name in ("producer", "consumer")
    ]
    with World((sides[0], sides[1])) as world:
        note("fault: clocks a year apart")
        began = time.monotonic()
        assert world.transfer()["end"] == "ready"
        late = world.through_relay(world.producer.ask("reserve", ["late"], MIB)[0])
        end = world.ended(world.fetch(late, 1.0), 1.0 + GRACE)
        assert end["reason"] == "deadline"
        assert time.monotonic() - began >= 1.0
        world.settle()
