# SPDX-License-Identifier: Apache-2.0
"""More than can be answered at once: nothing is lost, nobody starves, nothing grows."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from pathlib import Path

import msgspec
import pytest

from ec_connector.client import AgentClient
from ec_connector.protocol.local import Failed, Fetch, FetchItem, Ready, Release
from tests.chaos.world import Side, World, eventually, note

pytestmark = pytest.mark.chaos

AGENTS, CLIENTS_EACH, ITEMS_EACH = 16, 4, 32
FETCHES = AGENTS * CLIENTS_EACH * ITEMS_EACH
NBYTES = 4096
PARKED = 512
GROWTH = 32 * 1024
"""KiB by which the producer's agent may grow: the rest would be a copy of each request."""


def own_memory(pid: int) -> int:
    """KiB that a process holds for itself alone."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+)", status)[0])


def rate(world: World) -> float:
    """Transfers a second, one after the other."""
    begun = time.perf_counter()
    for _ in range(20):
        assert world.transfer(NBYTES)["end"] == "ready"
    return 20 / (time.perf_counter() - begun)


@pytest.mark.timeout(180)
def test_two_thousand_fetches_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """All of items that are not there yet, a quarter of what may be parked; then they are.

    Another peer that comes while the crowd waits is given a place at once.
    """
    pool = (FETCHES + 64) * 65536
    with contextlib.ExitStack() as stack:
        sides = Side("producer", pool_size=pool, max_parked=PARKED), Side("consumer")
        world = stack.enter_context(World(sides))
        before = rate(world)
        keys = [f"{number}" for number in range(FETCHES)]
        items = world.producer.ask("reserve", keys, NBYTES)
        wanted = iter(msgspec.convert(items, list[FetchItem]))
        agents = [Side(f"consumer {n}") for n in range(AGENTS)]
        for agent in agents:
            stack.callback(agent.close)
        clients = [
            stack.enter_context(AgentClient(agent.ask("facts")["endpoint"], "client"))
            for agent in agents
            for _ in range(CLIENTS_EACH)
        ]
        for client in clients:
            client.hello(5.0)
        idle = own_memory(world.producer.agent)

        for client in clients:
            mine = itertools.islice(wanted, ITEMS_EACH)
            batch = [msgspec.structs.replace(item, timeout_ms=60_000) for item in mine]
            assert client.send(Fetch(batch))
        note(f"fault: {FETCHES} fetches at once")
        eventually(lambda: world.producer.stats()["parked_now"] == PARKED, "no crowd comes")
        peak = own_memory(world.producer.agent)
        asked = world.consumer.stats()["requests_sent"]
        late = world.fetch(world.through_relay(world.producer.ask("reserve", ["late"], NBYTES)[0]))
        time.sleep(1.0)
        assert world.producer.stats()["parked_now"] == PARKED
        assert world.producer.ask("save", ["late"], NBYTES)
        assert world.ended(late)["end"] == "ready"
        assert world.consumer.stats()["requests_sent"] == asked + 1, "no place for a newcomer"
        assert world.producer.ask("save", keys, NBYTES)

        begun = time.monotonic()
        left = dict.fromkeys(clients, ITEMS_EACH)
        done: list[float] = []
        while left and time.monotonic() - begun < 60:
            for client in list(left):
                for answer in client.receive():
                    assert not isinstance(answer, Failed), answer
                    if isinstance(answer, Ready):
                        note("ended: ready")
                        client.send(Release([answer.key]))
                        left[client] -= 1
                if not left[client]:
                    del left[client]
                    done.append(time.monotonic() - begun)
        assert not left, f"{sum(left.values())} of {FETCHES} have not ended"
        peak = max(peak, own_memory(world.producer.agent))
        assert peak - idle < GROWTH, f"grown by {peak - idle} KiB"
        for agent in agents:
            agent.close()
        world.settle()
        after = rate(world)
        with capsys.disabled():
            figures = {
                "fetches": FETCHES,
                "first and last client done, s": [round(min(done), 2), round(max(done), 2)],
                "producer's agent grew, KiB": peak - idle,
                "transfers a second before and after": [round(before), round(after)],
            }
            print(f"\noverload: {json.dumps(figures)}")
