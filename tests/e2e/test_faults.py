# SPDX-License-Identifier: Apache-2.0
"""Real engines and their agents are killed; requests end all the same, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ec_connector.demo.chat import Answer, Body, chat_body
from ec_connector.demo.footprint import Footprint
from ec_connector.demo.measure import FETCHED_ITEMS
from ec_connector.demo.questions import Album
from ec_connector.demo.readings import encoded_pictures, growth, metrics, settled_metrics
from ec_connector.demo.servers import Server
from ec_connector.proxy.rewrite import metadata_only
from tests.e2e.watch import agents, by_reason, cpu_seconds, engine_processes, eventually, title

SMALL = (224, 224)
NAME = "@ec-connector-"  # how the names of our sockets begin
PROMPT = "What is to be seen?"
IDLE_SECONDS = 10.0
GONE_SECONDS = 2.0
BACK_SECONDS = 45.0

Encode = Callable[[Server, Body], Body]
Decode = Callable[[Server, Body, Body], Answer]


@pytest.fixture(scope="module")
def bodies(album: Album, reference: Callable[[Body], Answer]) -> list[Body]:
    """Requests whose right answers are known, before the reference makes room for the pair."""
    made = [chat_body([album.photo(*SMALL)], PROMPT) for _ in range(16)]
    for body in made:
        reference(body)
    return made


@pytest.fixture
def pair(fleet: Any, bodies: list[Body]) -> list[Server]:
    """A producer and a consumer, started anew if an earlier test killed them."""
    servers: list[Server] = fleet.need("producer", "consumer")
    for server in servers:
        encoded_pictures(server.url)
    return servers


def test_idle_pair_sleeps(pair: list[Server]) -> None:
    """Engines and agents without requests use next to no CPU; the figures are printed."""
    watched = {
        pid: title(pid)
        for server in pair
        for pid in (*agents(server), *engine_processes(server)[1:])
    }
    time.sleep(1.0)  # what the last request left to do
    before = {pid: cpu_seconds(pid) for pid in watched}
    time.sleep(IDLE_SECONDS)
    used = {pid: cpu_seconds(pid) - before[pid] for pid in watched}
    for pid, name in watched.items():
        print(f"idle: {100 * used[pid] / IDLE_SECONDS:.2f} % of a core: {name[:60]}")
    own = [used[pid] for pid, name in watched.items() if "ec_connector.agent" in name]
    assert len(own) == 2
    assert max(own) < 0.01 * IDLE_SECONDS
    # vLLM's own processes have housekeeping of their own; an engine that does not sleep uses 26 %.
    assert max(used.values()) < 0.05 * IDLE_SECONDS


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_agent_killed_in_mid_run(
    side: str,
    pair: list[Server],
    bodies: list[Body],
    reference: Callable[[Body], Answer],
    album: Album,
    encode: Encode,
    decode: Decode,
) -> None:
    """Requests under way end rightly, another agent comes, and items are loaded again."""
    producer, consumer = pair
    victim = producer if side == "producer" else consumer
    (first,) = agents(victim)

    def through(body: Body) -> Answer:
        return decode(consumer, body, encode(producer, body))

    with ThreadPoolExecutor(len(bodies)) as pool:
        waiting = [pool.submit(through, body) for body in bodies]
        time.sleep(0.2)
        os.kill(first, signal.SIGKILL)
        answers = [one.result() for one in waiting]
    expected = [reference(body).token_ids for body in bodies]
    assert [one.token_ids for one in answers] == expected
    assert eventually(lambda: agents(victim) not in ([], [first]), BACK_SECONDS)

    def loads_again() -> bool:
        before, encoded = metrics(consumer.url), encoded_pictures(consumer.url)
        assert through(chat_body([album.photo(*SMALL)], PROMPT)).status == 200
        if encoded_pictures(consumer.url) != encoded:
            return False
        after = settled_metrics(
            consumer.url, wanted=FETCHED_ITEMS, above=before.get(FETCHED_ITEMS, 0.0)
        )
        return growth(before, after, FETCHED_ITEMS) == 1

    assert eventually(loads_again, BACK_SECONDS)


def test_producer_dies_after_it_announced(
    pair: list[Server],
    fleet: Any,
    bodies: list[Body],
    reference: Callable[[Body], Answer],
    album: Album,
    encode: Encode,
    decode: Decode,
) -> None:
    """With the media the answer is the same, and counted; without it that request fails alone."""
    producer, consumer = pair
    body, bare = (chat_body([album.photo(*SMALL)], PROMPT) for _ in range(2))
    with_media, without = encode(producer, body), encode(producer, bare)
    sent, replaced = metadata_only(bare, without)
    assert replaced == 1, without
    for pid in (*agents(producer), *engine_processes(producer)):
        os.kill(pid, signal.SIGKILL)
    encoded = encoded_pictures(consumer.url)
    begun = time.monotonic()

    answer = decode(consumer, body, with_media)
    assert answer.status == 200
    assert encoded_pictures(consumer.url) == encoded + 1
    assert eventually(
        lambda: by_reason(consumer.url, "fallback_items").get("peer_unreachable", 0) >= 1, 5.0
    )
    refused = decode(consumer, sent, without)
    assert refused.status >= 500
    assert eventually(
        lambda: by_reason(consumer.url, "failed_requests").get("peer_unreachable", 0) == 1, 5.0
    )
    assert time.monotonic() - begun < 15.0
    next_one = decode(consumer, bodies[0], {})
    assert next_one.token_ids == reference(bodies[0]).token_ids
    log = consumer.log.read_text(errors="replace")
    (key,) = without
    assert any(key in line and "peer_unreachable" in line for line in log.splitlines())
    fleet.stop("producer")


@pytest.mark.parametrize("name", ["producer", "consumer", "both"])
def test_killed_engine_leaves_nothing(name: str, fleet: Any, bodies: list[Body]) -> None:
    """After kill -9 of all of an engine's processes its agent is gone within two seconds."""
    (server,) = fleet.need(name)
    held = Footprint()
    held.add(server.processes())
    assert len(agents(server)) == 1
    for pid in engine_processes(server):
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not agents(server), GONE_SECONDS)
    assert eventually(lambda: not server.processes(), GONE_SECONDS)
    server.process.wait()
    # vLLM's own socket files stay; they lie in the fleet's temporary folder.
    assert eventually(lambda: not any(NAME in line for line in held.remains()), GONE_SECONDS)
    assert any(NAME in name for name in held.sockets)
    fleet.stop(name)
