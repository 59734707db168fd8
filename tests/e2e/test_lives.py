# SPDX-License-Identifier: Apache-2.0
"""What becomes of requests that are given up, crowded out, or served only in part."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from ec_connector import Consumer, Producer
from ec_connector.arrays import bytes_of
from ec_connector.demo.chat import Answer, Body, ask, chat_body
from ec_connector.demo.measure import FETCHED_ITEMS
from ec_connector.demo.questions import Album
from ec_connector.demo.readings import encoded_pictures, growth, metrics, settled_metrics
from ec_connector.demo.servers import LOOPBACK, Server
from ec_connector.protocol.local import ReserveItem
from ec_connector.proxy.rewrite import decode_body, metadata_only
from tests.e2e.watch import agent_stats, agents, by_reason, eventually

PHOTO, SMALL, LARGE = (640, 480), (224, 224), (2000, 1500)
PROMPT = "What is to be seen?"

Encode = Callable[[Server, Body], Body]
Decode = Callable[[Server, Body, Body], Answer]
Reference = Callable[[Body], Answer]


def elsewhere(announced: Body, host: str, port: int) -> Body:
    """The announcement with another peer's address."""
    moved: Body = json.loads(json.dumps(announced))
    for entry in moved.values():
        entry["peer_host"], entry["peer_port"] = host, port
    return moved


def send(url: str, body: Body) -> http.client.HTTPConnection:
    """Send a request whose answer is not waited for."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60.0)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection


def at_rest(consumer: Server) -> bool:
    """Whether nothing is fetched, waited for or pinned."""
    now = agent_stats(consumer)
    return (now["fetching"], now["blocks_pinned"]) == (0, 0)


@pytest.fixture
def hole() -> Iterator[int]:
    """A port where connections are taken and nothing is ever said."""
    with socket.create_server((LOOPBACK, 0), backlog=256) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(scope="module")
def bodies(album: Album, reference: Reference) -> list[Body]:
    """Requests with one photo each, whose right answers are known."""
    made = [chat_body([album.photo(*PHOTO)], PROMPT) for _ in range(12)]
    made += [chat_body([album.photo(*SMALL), album.photo(*SMALL)], PROMPT) for _ in range(4)]
    made += [chat_body([album.photo(*LARGE)], PROMPT)]
    for body in made:
        reference(body)
    return made


@pytest.fixture
def trio(fleet: Any, bodies: list[Body]) -> list[Server]:
    """Two producers, one of them with a small pool, and a consumer."""
    servers: list[Server] = fleet.need("producer", "consumer", "producer-small")
    for server in servers:
        encoded_pictures(server.url)
    return servers


# ── given up ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [1, 100])
def test_client_leaves_while_waiting(
    count: int,
    trio: list[Server],
    hole: int,
    album: Album,
    bodies: list[Body],
    reference: Reference,
    encode: Encode,
    decode: Decode,
) -> None:
    """What it waited for is given up with it, and others go on."""
    producer, consumer, _ = trio
    body = chat_body([album.photo(*SMALL)], PROMPT)
    announced = elsewhere(encode(producer, body), LOOPBACK, hole)
    leaving = [send(consumer.url, decode_body(body, announced)) for _ in range(count)]
    assert eventually(lambda: agent_stats(consumer)["fetching"] == 1, 2.0)
    for connection in leaving:
        connection.close()
    assert eventually(lambda: at_rest(consumer), 5.0), agent_stats(consumer)
    answer = decode(consumer, bodies[0], encode(producer, bodies[0]))
    assert answer.token_ids == reference(bodies[0]).token_ids


def test_clients_leave_while_loading(
    trio: list[Server],
    album: Album,
    bodies: list[Body],
    reference: Reference,
    encode: Encode,
    decode: Decode,
) -> None:
    """At any moment of a request's life: nothing stays pinned."""
    producer, consumer, _ = trio
    for number in range(12):
        body = chat_body([album.photo(*SMALL)], PROMPT, max_tokens=64)
        connection = send(consumer.url, decode_body(body, encode(producer, body)))
        time.sleep(0.01 * number)
        connection.close()
    assert eventually(lambda: at_rest(consumer), 10.0), agent_stats(consumer)
    answer = decode(consumer, bodies[1], encode(producer, bodies[1]))
    assert answer.token_ids == reference(bodies[1]).token_ids


# ── at once ──────────────────────────────────────────────────────────────────


def test_many_wait_for_one_item(
    trio: list[Server], bodies: list[Body], reference: Reference, encode: Encode
) -> None:
    """Forty requests, four seats, an item that comes later: one transfer, all answered."""
    producer, consumer, _ = trio
    body = bodies[2]
    announced = encode(producer, body)
    ((key, entry),) = announced.items()
    with Producer(pool_size="16MiB") as saving, Consumer(pool_size="16MiB") as reader:
        dtype, rows = bytes_of(reader.fetch(key, entry), entry["dtype"])
        place = saving._reserve(ReserveItem(key, rows.nbytes, dtype, list(entry["shape"])))
        late = elsewhere(announced, *saving.address)
        before = agent_stats(consumer)
        with ThreadPoolExecutor(40) as pool:
            asked = [pool.submit(ask, consumer.url, decode_body(body, late)) for _ in range(40)]
            assert eventually(lambda: agent_stats(consumer)["fetching"] == 1, 5.0)
            saving._save(place, rows)
            answers = [one.result() for one in asked]
        after = agent_stats(consumer)
    assert {tuple(one.token_ids) for one in answers} == {tuple(reference(body).token_ids)}
    assert after["bytes_received"] - before.get("bytes_received", 0) == entry["size_bytes"]


# ── served in part ───────────────────────────────────────────────────────────


def test_one_of_two_items_cannot_be_had(
    trio: list[Server], bodies: list[Body], reference: Reference, encode: Encode, decode: Decode
) -> None:
    """With the media the answer is the same and one is encoded; without it the request fails."""
    producer, consumer, _ = trio
    with socket.create_server((LOOPBACK, 0)) as one:
        nobody = one.getsockname()[1]
    for body, bare in ((bodies[12], False), (bodies[13], True)):
        announced = encode(producer, body)
        first = sorted(announced)[0]
        announced |= elsewhere({first: announced[first]}, LOOPBACK, nobody)
        encoded = encoded_pictures(consumer.url)
        sent = metadata_only(body, announced)[0] if bare else body
        answer = decode(consumer, sent, announced)
        if bare:
            assert answer.status >= 500
        else:
            assert answer.token_ids == reference(body).token_ids
            assert encoded_pictures(consumer.url) == encoded + 1
    assert by_reason(consumer.url, "fallback_items").get("peer_unreachable", 0) >= 1


def test_evicted_between_announcement_and_fetch(
    trio: list[Server], bodies: list[Body], reference: Reference, encode: Encode, decode: Decode
) -> None:
    """A pool of one photo that has seen three: missing is no error, unless the media is too."""
    _, consumer, small = trio
    bodies = bodies[3:6]
    announcements = [encode(small, body) for body in bodies]
    encoded = encoded_pictures(consumer.url)
    answer = decode(consumer, bodies[0], announcements[0])
    assert answer.token_ids == reference(bodies[0]).token_ids
    assert encoded_pictures(consumer.url) == encoded + 1
    sent, replaced = metadata_only(bodies[1], announcements[1])
    assert replaced == 1
    assert decode(consumer, sent, announcements[1]).status >= 500
    loaded = decode(consumer, bodies[2], announcements[2])
    assert loaded.token_ids == reference(bodies[2]).token_ids
    assert encoded_pictures(consumer.url) == encoded + 1
    assert by_reason(consumer.url, "fallback_items").get("missing", 0) >= 1
    assert by_reason(consumer.url, "failed_requests").get("missing", 0) >= 1


def test_larger_than_the_pool(
    trio: list[Server], bodies: list[Body], reference: Reference, encode: Encode, decode: Decode
) -> None:
    """It is encoded and not announced; the consumer, which has the media, encodes it too."""
    _, consumer, small = trio
    body = bodies[16]
    announced = encode(small, body)
    assert not any("peer_host" in entry for entry in announced.values())
    assert decode(consumer, body, announced).token_ids == reference(body).token_ids


def test_raw_then_bare_then_raw(
    trio: list[Server], bodies: list[Body], reference: Reference, encode: Encode, decode: Decode
) -> None:
    """One photo with its media, without, and with it again: the same answer each time."""
    producer, consumer, _ = trio
    body = bodies[7]
    announced = encode(producer, body)
    bare, replaced = metadata_only(body, announced)
    assert replaced == 1
    answers = [
        decode(consumer, body, {}),
        decode(consumer, bare, announced),
        decode(consumer, body, announced),
        decode(consumer, bare, announced),
        decode(consumer, body, {}),
    ]
    assert [one.token_ids for one in answers] == [reference(body).token_ids] * 5


# ── topologies ───────────────────────────────────────────────────────────────


def test_two_producers_in_one_request(
    trio: list[Server], bodies: list[Body], reference: Reference, encode: Encode, decode: Decode
) -> None:
    """One item each from two producers, one of them on IPv6."""
    producer, consumer, small = trio
    body = bodies[14]
    here, there = encode(producer, body), encode(small, body)
    first, second = sorted(here)
    encoded, before = encoded_pictures(consumer.url), metrics(consumer.url)
    answer = decode(consumer, body, {first: here[first], second: there[second]})
    assert there[second]["peer_host"] == "::1"
    assert answer.token_ids == reference(body).token_ids
    assert encoded_pictures(consumer.url) == encoded
    after = settled_metrics(consumer.url, wanted=FETCHED_ITEMS, above=before.get(FETCHED_ITEMS, 0))
    assert growth(before, after, FETCHED_ITEMS) == 2


def test_data_parallel_ranks(
    fleet: Any, bodies: list[Body], reference: Reference, encode: Encode, decode: Decode
) -> None:
    """Each has an agent and a port of its own; as producers and as consumers both are reached."""
    expected = [reference(body).token_ids for body in bodies[:12]]
    ranks, producer, consumer = fleet.need("both-dp2", "producer", "consumer")
    for server in (ranks, producer, consumer):
        encoded_pictures(server.url)

    def encode_all(server: Server, asked: list[Body]) -> list[Body]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(partial(encode, server), asked))

    first, second = bodies[:6], bodies[6:12]
    announcements = encode_all(ranks, first)
    ports = {entry["peer_port"] for one in announcements for entry in one.values()}
    assert len(ports) == len(agents(ranks)) == 2
    encoded = encoded_pictures(consumer.url)
    answers = [decode(consumer, body, own) for body, own in zip(first, announcements, strict=True)]
    assert encoded_pictures(consumer.url) == encoded

    encoded = encoded_pictures(ranks.url)
    announcements = encode_all(producer, second)
    with ThreadPoolExecutor(4) as pool:
        answers += pool.map(partial(decode, ranks), second, announcements)
    assert encoded_pictures(ranks.url) == encoded
    assert [one.token_ids for one in answers] == expected
    fleet.stop("both-dp2")


# ── more than a tight engine has room for ────────────────────────────────────


@pytest.fixture
def tight(fleet: Any, bodies: list[Body]) -> list[Server]:
    """A pair whose consumer has room for two photos in its pool."""
    servers: list[Server] = fleet.need("producer-tight", "consumer-tight")
    for server in servers:
        encoded_pictures(server.url)
    return servers


def test_three_photos_and_a_pool_for_two(
    tight: list[Server], album: Album, encode: Encode, decode: Decode
) -> None:
    """What finds no room is encoded here, and said; without the media the request fails.

    What finds room came over ZMQ in packed form: this consumer takes nothing else.
    """
    producer, consumer = tight
    for bare in (False, True):
        body = chat_body([album.photo(*PHOTO) for _ in range(3)], PROMPT)
        announced = encode(producer, body)
        assert {entry["peer_host"] for entry in announced.values()} == {"localhost"}
        encoded = encoded_pictures(consumer.url)
        sent = metadata_only(body, announced)[0] if bare else body
        assert (decode(consumer, sent, announced).status == 200) is not bare
        assert encoded_pictures(consumer.url) - encoded == (0 if bare else 1)
    assert by_reason(consumer.url, "fallback_items").get("pool_full", 0) == 1
    assert by_reason(consumer.url, "failed_requests").get("pool_full", 0) == 1
    assert eventually(lambda: at_rest(consumer), 5.0)
