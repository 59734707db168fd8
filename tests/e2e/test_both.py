# SPDX-License-Identifier: Apache-2.0
"""Two engines that both encode and decode, with keys and tickets; one has room for next to nothing.

Its encoder cache holds one image of the largest size, it has too few KV blocks for two long
requests, and no prefix cache. Answers are compared with those of the same engine when it encodes
for itself.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ec_connector import Consumer
from ec_connector.demo.chat import Answer, Body, ask, ask_all, chat_body
from ec_connector.demo.measure import FETCHED_ITEMS
from ec_connector.demo.questions import Album
from ec_connector.demo.readings import encoded_pictures, growth, metrics, settled_metrics
from ec_connector.demo.servers import Server
from ec_connector.errors import FetchError, ItemMissingError, PeerRefusedError
from ec_connector.proxy.rewrite import count_announced, decode_body, metadata_only
from ec_connector.testing import FakeProducer
from tests.e2e.test_lives import at_rest, send
from tests.e2e.watch import agent_stats, by_reason, eventually, post

SMALL, LARGE = (224, 224), (2000, 1500)
PROMPT = "What is to be seen?"
ABORTS, PHOTOS = 100, 10
QUIET_SECONDS = 3.0
"""Well below ``fetch_timeout``, with which all would end by itself."""
HITS = "vllm:ec_pool_hit_items_total"
LOADED_ITEMS = "vllm:ec_pool_loaded_items_total"
PREEMPTIONS = "vllm:num_preemptions_total"
WAITING = "vllm:num_requests_waiting"

Encode = Callable[[Server, Body], Body]
Decode = Callable[[Server, Body, Body], Answer]


@pytest.fixture
def both(fleet: Any) -> list[Server]:
    """The one with room, and the one without."""
    servers: list[Server] = fleet.need("both", "both-cramped")
    for server in servers:
        encoded_pictures(server.url)
    return servers


def without_media(body: Body, announced: Body) -> Body:
    """The body with all of its pictures replaced by metadata."""
    sent, replaced = metadata_only(body, announced)
    assert replaced == count_announced(announced) > 0
    return sent


@pytest.fixture
def late(fleet: Any) -> Iterator[FakeProducer]:
    """A producer of the same fleet that saves when it is told to."""
    with FakeProducer(pool_size="16MiB", **fleet.secrets) as producer:
        yield producer


@pytest.fixture
def reader(fleet: Any) -> Iterator[Consumer]:
    """Somebody else of the same fleet who reads encodings."""
    with Consumer(pool_size="16MiB", **fleet.secrets) as consumer:
        yield consumer


def parked(late: FakeProducer, reader: Consumer, announced: Body) -> Body:
    """The announcement of the same items by a producer that has not saved them yet."""
    moved = {}
    for key, entry in announced.items():
        place = late.announce(key, reader.fetch(key, entry), entry["dtype"])
        there = {name: place[name] for name in ("peer_host", "peer_port", "ticket")}
        moved[key] = {**entry, **there}
    return moved


def alone(server: Server, bodies: Sequence[Body]) -> list[list[int]]:
    """What the engine answers when all it had is dropped, and it encodes every item itself."""
    for cache in ("encoder", "mm", "prefix"):
        post(f"{server.url}/reset_{cache}_cache")
    encoded = encoded_pictures(server.url)
    answers = [ask(server.url, body) for body in bodies]
    assert [one.status for one in answers] == [200] * len(answers)
    items = sum(len(body["messages"][0]["content"]) - 1 for body in bodies)
    assert encoded_pictures(server.url) == encoded + items
    return [one.token_ids for one in answers]


@pytest.mark.parametrize("way", ["there", "back"])
def test_both_ways(
    way: str, both: list[Server], album: Album, encode: Encode, decode: Decode
) -> None:
    """Each loads what the other encoded, with its media and without."""
    producer, consumer = both if way == "there" else both[::-1]
    bodies = [chat_body([album.photo(*SMALL)], PROMPT) for _ in range(3)]
    own = [encode(producer, body) for body in bodies]
    sent = [bodies[0], without_media(bodies[1], own[1]), bodies[2]]
    encoded, before = encoded_pictures(consumer.url), metrics(consumer.url)
    loaded = [decode(consumer, *case) for case in zip(sent, own, strict=True)]
    assert encoded_pictures(consumer.url) == encoded
    known = before.get(FETCHED_ITEMS, 0.0)
    after = settled_metrics(consumer.url, wanted=FETCHED_ITEMS, above=known + 2)
    assert growth(before, after, FETCHED_ITEMS) == 3
    assert growth(before, after, HITS) == 0
    assert [one.token_ids for one in loaded] == alone(consumer, bodies)


def test_who_has_no_key_or_no_ticket_gets_nothing(
    both: list[Server], album: Album, encode: Encode, reader: Consumer, fleet: Any
) -> None:
    """What this fleet's members read, others do not, and the engine says so."""
    producer, _ = both
    ((key, entry),) = encode(producer, chat_body([album.photo(*SMALL)], PROMPT)).items()
    assert reader.fetch(key, entry).shape == tuple(entry["shape"])
    unsigned = {name: value for name, value in entry.items() if name != "ticket"}
    refused = agent_stats(producer)
    with Consumer(pool_size="16MiB") as stranger, pytest.raises(FetchError):
        stranger.fetch(key, entry, timeout=3.0)
    keys = {"curve_keys": fleet.secrets["curve_keys"], "allow_peers": ["*"]}
    with Consumer(pool_size="16MiB", **keys) as member, pytest.raises(ItemMissingError):
        member.fetch(key, unsigned)
    with pytest.raises(PeerRefusedError):
        reader.fetch(f"{key}-", entry)
    after = agent_stats(producer)
    for name in ("peers_handshake_failed", "tickets_refused"):
        assert after.get(name, 0) > refused.get(name, 0), name


def test_preempted_request_loads_its_items_again(
    both: list[Server],
    album: Album,
    encode: Encode,
    decode: Decode,
    late: FakeProducer,
    reader: Consumer,
) -> None:
    """Two requests take the KV blocks from each other, and the images the room in the cache."""
    producer, consumer = both
    bodies = [chat_body([album.photo(*LARGE) for _ in "ab"], PROMPT, max_tokens=60) for _ in "ab"]
    own = [encode(producer, body) for body in bodies]
    sent = [without_media(body, one) for body, one in zip(bodies, own, strict=True)]
    encoded, before = encoded_pictures(consumer.url), metrics(consumer.url)
    with ThreadPoolExecutor(1) as asking:
        asked = [
            decode_body(body, parked(late, reader, one))
            for body, one in zip(sent, own, strict=True)
        ]
        waiting = asking.submit(ask_all, consumer.url, asked)
        all_wait = eventually(lambda: metrics(consumer.url)[WAITING] == len(asked), 20.0)
        for key in [key for one in own for key in one]:  # so that both begin in one step
            late.land(key)
        answers = waiting.result()
    assert all_wait
    assert encoded_pictures(consumer.url) == encoded
    known = before.get(LOADED_ITEMS, 0.0)
    after = settled_metrics(consumer.url, wanted=LOADED_ITEMS, above=known + 4)
    assert growth(before, after, PREEMPTIONS) >= 1
    assert growth(before, after, LOADED_ITEMS) > 4  # once each, and what was preempted again
    assert eventually(lambda: at_rest(consumer), QUIET_SECONDS), agent_stats(consumer)
    assert [one.token_ids for one in answers] == alone(consumer, bodies)


def test_item_larger_than_the_encoder_cache(
    both: list[Server], album: Album, encode: Encode, decode: Decode
) -> None:
    """vLLM refuses the request as it would without us, and nothing is fetched for it."""
    producer, consumer = both
    body = chat_body([album.photo(1120, 1120)], PROMPT)
    body |= {"mm_processor_kwargs": {"max_pixels": 1600 * 28 * 28}, "stream": False}
    announced = encode(producer, body)
    assert count_announced(announced) == 1
    fetches = agent_stats(consumer).get("fetches", 0)
    plain = ask(consumer.url, body)
    answer = decode(consumer, body, announced)
    assert (answer.status, answer.error) == (plain.status, plain.error)
    assert answer.status == http.client.BAD_REQUEST
    assert "encoder cache" in answer.error
    assert agent_stats(consumer).get("fetches", 0) == fetches


def test_item_whose_media_vllm_only_believes_to_have(
    both: list[Server], album: Album, encode: Encode, decode: Decode
) -> None:
    """Media, then metadata, then media again: vLLM does not send the pixels a second time.

    While the pool has the rows the request is answered. When they are gone too it can only fail:
    with an error of its own, and the next one is served.
    """
    producer, consumer = both
    body = chat_body([album.photo(*SMALL)], PROMPT)
    announced = encode(producer, body)
    bare = without_media(body, announced)
    cases = ((body, announced), (bare, announced), (body, {}), (bare, announced))
    answers = [decode(consumer, *case) for case in cases]
    assert [one.status for one in answers] == [200] * 4
    assert len({tuple(one.token_ids) for one in answers}) == 1
    post(f"{consumer.url}/reset_encoder_cache")
    before = by_reason(consumer.url, "failed_requests")
    failed = decode(consumer, {**body, "stream": False}, {})
    assert failed.status == http.client.INTERNAL_SERVER_ERROR
    expected = {**before, "missing": before.get("missing", 0) + 1}
    assert eventually(lambda: by_reason(consumer.url, "failed_requests") == expected, 5.0)
    again = decode(consumer, body, announced)
    assert [again.token_ids] == [answers[0].token_ids] == alone(consumer, [body])


def test_hundred_clients_leave_while_ten_items_are_parked(
    both: list[Server],
    album: Album,
    encode: Encode,
    decode: Decode,
    late: FakeProducer,
    reader: Consumer,
) -> None:
    """Nothing is left of them at the consumer, nor at the producer that has yet to save."""
    producer, consumer = both
    bodies = [chat_body([album.photo(*SMALL)], PROMPT) for _ in range(PHOTOS)]
    own = [encode(producer, body) for body in bodies]
    waiting = [
        decode_body(without_media(body, one), parked(late, reader, one))
        for body, one in zip(bodies, own, strict=True)
    ]
    given_up = [send(consumer.url, body) for body in waiting * (ABORTS // PHOTOS)]
    assert eventually(lambda: metrics(consumer.url)[WAITING] == ABORTS, 20.0)
    assert agent_stats(consumer)["fetching"] == PHOTOS
    for connection in given_up:
        connection.close()
    assert eventually(lambda: at_rest(consumer), QUIET_SECONDS), agent_stats(consumer)
    assert eventually(lambda: metrics(consumer.url)[WAITING] == 0, QUIET_SECONDS)
    for announced in own:  # saved for nobody now: nothing is sent, and all is well
        late.land(*announced)
    sent = without_media(bodies[0], own[0])
    assert [decode(consumer, sent, own[0]).token_ids] == alone(consumer, bodies[:1])
