# SPDX-License-Identifier: Apache-2.0
"""A consumer on two ranks: each of them loads what one producer saved.

Two ranks round otherwise than one, so the answers are compared with those of the
same engine when it encodes for itself.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from typing import Any

from ec_connector.demo.chat import Answer, Body, ask, chat_body
from ec_connector.demo.measure import FETCHED_ITEMS
from ec_connector.demo.questions import Album
from ec_connector.demo.readings import encoded_pictures, growth, metrics, settled_metrics
from ec_connector.demo.servers import Server
from ec_connector.proxy.rewrite import metadata_only
from tests.e2e.watch import agents, by_reason, engine_processes, eventually, post, title

PHOTO, SMALL = (640, 480), (224, 224)


def test_two_ranks_load_what_one_producer_saved(
    fleet: Any,
    album: Album,
    encode: Callable[[Server, Body], Body],
    decode: Callable[[Server, Body, Body], Answer],
) -> None:
    """Every kind of request is answered as when the consumer encodes for itself."""
    producer, consumer = fleet.need("producer", "consumer-tp2")
    encoded_pictures(consumer.url)
    a, b, c, d, e, f = (album.photo(*size) for size in (PHOTO, SMALL) * 3)
    asked = [
        chat_body([], "Name a river."),
        chat_body([a], "What is to be seen?"),
        chat_body([b], "What is to be seen?", max_tokens=1),
        chat_body([c, d], "Compare them.", max_tokens=48),
        {**chat_body([e, e], "Compare them."), "stream": False},
    ]
    bare = chat_body([f], "What is to be seen?")
    before = metrics(consumer.url)

    # All of them first: with both cores spinning in the consumer, the producer's agent may be late.
    announcements = [encode(producer, body) for body in asked]
    announced = encode(producer, bare)
    loaded = [decode(consumer, body, own) for body, own in zip(asked, announcements, strict=True)]
    sent, replaced = metadata_only(bare, announced)
    assert replaced == 1
    loaded.append(decode(consumer, sent, announced))

    assert encoded_pictures(consumer.url) == 0
    after = settled_metrics(consumer.url, wanted=FETCHED_ITEMS, above=5)
    assert growth(before, after, FETCHED_ITEMS) == 6

    for cache in ("encoder", "mm", "prefix"):
        post(f"{consumer.url}/reset_{cache}_cache")
    alone = [ask(consumer.url, body) for body in [*asked, bare]]
    assert encoded_pictures(consumer.url) == 6
    assert [one.status for one in (*loaded, *alone)] == [200] * 2 * len(alone)
    assert [one.token_ids for one in loaded] == [one.token_ids for one in alone]


def test_one_rank_cannot_load(
    fleet: Any,
    album: Album,
    encode: Callable[[Server, Body], Body],
    decode: Callable[[Server, Body, Body], Answer],
) -> None:
    """Rank 1 alone cannot map a new agent's pool: that request fails, the engine goes on."""
    producer, consumer = fleet.need("producer", "consumer-tp2")
    bodies = [chat_body([album.photo(*SMALL)], "What is to be seen?") for _ in range(3)]
    announcements = [encode(producer, body) for body in bodies]
    assert decode(consumer, bodies[0], announcements[0]).status == 200
    (rank,) = [pid for pid in engine_processes(consumer) if title(pid).endswith("TP1")]
    (agent,) = agents(consumer)
    limits = resource.prlimit(rank, resource.RLIMIT_NOFILE)
    resource.prlimit(rank, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        os.kill(agent, signal.SIGKILL)
        assert eventually(lambda: "another agent serves" in consumer.log.read_text(), 60.0)
        assert decode(consumer, bodies[1], announcements[1]).status >= 500
    finally:
        resource.prlimit(rank, resource.RLIMIT_NOFILE, limits)
    failed = by_reason(consumer.url, "failed_requests")
    assert failed.get("load_failed", 0) == 1, failed
    encoded = encoded_pictures(consumer.url)
    answer = decode(consumer, bodies[2], announcements[2])
    assert answer.status == 200, answer.error
    assert encoded_pictures(consumer.url) == encoded


def test_one_rank_dies(fleet: Any) -> None:
    """vLLM ends the engine then, and nothing of ours outlives it."""
    (consumer,) = fleet.need("consumer-tp2")
    (rank,) = [pid for pid in engine_processes(consumer) if title(pid).endswith("TP1")]
    os.kill(rank, signal.SIGKILL)
    assert eventually(lambda: not agents(consumer), 20.0)
    fleet.stop("consumer-tp2")


def test_one_rank_loads_what_two_encoded(
    fleet: Any,
    album: Album,
    reference: Callable[[Body], Answer],
    encode: Callable[[Server, Body], Body],
    decode: Callable[[Server, Body, Body], Answer],
) -> None:
    """Rank 0 saves for all; each photo was encoded by one of the two."""
    bodies = [chat_body([album.photo(*PHOTO), album.photo(*SMALL)], "Compare.") for _ in range(3)]
    expected = [reference(body).token_ids for body in bodies]
    producer, consumer = fleet.need("producer-tp2", "consumer")
    announcements = [encode(producer, body) for body in bodies]
    encoded = encoded_pictures(consumer.url)
    answers = [decode(consumer, body, own) for body, own in zip(bodies, announcements, strict=True)]
    assert [one.token_ids for one in answers] == expected
    assert encoded_pictures(consumer.url) == encoded
    fleet.stop("producer-tp2")
