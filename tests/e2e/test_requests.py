# SPDX-License-Identifier: Apache-2.0
"""Every kind of request through a producer/consumer pair, on both model runners.

Each answer must be, token by token, that of an ordinary vLLM, and the consumer's
encoder must not have run: counted in its worker, where the model's encoder is called.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from ec_connector.demo.chat import Answer, Body, ask, chat_body
from ec_connector.demo.measure import FETCHED_ITEMS
from ec_connector.demo.questions import Album
from ec_connector.demo.readings import encoded_pictures, growth, metrics, settled_metrics
from ec_connector.demo.servers import Server
from ec_connector.proxy.rewrite import count_announced, metadata_only
from tests.e2e.watch import eventually, payload_received

PHOTO, SMALL, LARGE = (640, 480), (224, 224), (2000, 1500)


@dataclass(frozen=True)
class Kind:
    """A kind of request: sizes of its pictures, ``same``: all are the same file."""

    name: str
    sizes: tuple[tuple[int, int], ...] = ()
    same: bool = False
    max_tokens: int = 16
    stream: bool = True
    metadata: bool = False


KINDS = [
    Kind("photo", (PHOTO,)),
    Kind("photo-whole-answer", (PHOTO,), stream=False),
    Kind("photo-one-token", (PHOTO,), max_tokens=1),
    Kind("photo-many-tokens", (PHOTO,), max_tokens=64),
    Kind("small-photo", (SMALL,)),
    Kind("large-photo", (LARGE,)),
    Kind("two-photos", (PHOTO, PHOTO)),
    Kind("two-sizes", (SMALL, PHOTO)),
    Kind("same-photo-twice", (PHOTO, PHOTO), same=True),
    Kind("three-small-photos", (SMALL, SMALL, SMALL)),
    Kind("metadata-photo", (PHOTO,), metadata=True),
    Kind("metadata-small-photo", (SMALL,), metadata=True),
    Kind("metadata-two-photos", (PHOTO, SMALL), metadata=True),
    Kind("metadata-same-twice", (SMALL, SMALL), same=True, metadata=True),
    Kind("metadata-whole-answer", (PHOTO,), stream=False, metadata=True),
    Kind("text"),
]


@pytest.fixture(scope="module")
def bodies(album: Album, reference: Callable[[Body], Answer]) -> dict[str, Body]:
    """One request of each kind; the reference has answered all before any pair starts."""
    made = {}
    for kind in KINDS:
        photos = [album.photo(*size) for size in kind.sizes]
        photos = photos[:1] * len(photos) if kind.same else photos
        body = chat_body(photos, "What is to be seen?", max_tokens=kind.max_tokens)
        made[kind.name] = {**body, "stream": kind.stream}
        reference(made[kind.name])
    return made


@pytest.fixture(scope="module", params=["v1", "v2"])
def pair(request: pytest.FixtureRequest, bodies: Any, fleet: Any) -> list[Server]:
    """Producer and consumer on one of the runners."""
    names = {"v1": ("producer", "consumer"), "v2": ("both-v2", "consumer-v2")}[request.param]
    servers: list[Server] = fleet.need(*names)
    for server in servers:
        encoded_pictures(server.url)
    return servers


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_answer_is_that_of_one_vllm(
    kind: Kind,
    pair: list[Server],
    bodies: dict[str, Body],
    reference: Callable[[Body], Answer],
    encode: Callable[[Server, Body], Body],
    decode: Callable[[Server, Body, Body], Answer],
) -> None:
    """The pair answers as one vLLM does, and the consumer loads what the producer encoded."""
    producer, consumer = pair
    body = sent = bodies[kind.name]
    distinct = min(1, len(kind.sizes)) if kind.same else len(kind.sizes)
    encoded = encoded_pictures(producer.url), encoded_pictures(consumer.url)
    before = metrics(consumer.url)

    announced = encode(producer, body)
    assert count_announced(announced) == len(kind.sizes)
    if kind.metadata:
        sent, replaced = metadata_only(body, announced)
        assert replaced == len(kind.sizes)
        assert "image_url" not in str(sent)
    answer = decode(consumer, sent, announced)

    assert answer.status == 200, answer.error
    assert answer.token_ids == reference(body).token_ids
    assert len(answer.token_ids) == kind.max_tokens
    assert encoded_pictures(producer.url) - encoded[0] == distinct
    assert encoded_pictures(consumer.url) == encoded[1]
    after = settled_metrics(
        consumer.url,
        wanted=FETCHED_ITEMS if distinct else "",
        above=before.get(FETCHED_ITEMS, 0.0) + distinct - 1,
    )
    assert growth(before, after, FETCHED_ITEMS) == distinct


def test_prefix_cache_hit(
    pair: list[Server],
    bodies: dict[str, Body],
    reference: Callable[[Body], Answer],
    encode: Callable[[Server, Body], Body],
    decode: Callable[[Server, Body, Body], Answer],
) -> None:
    """A prompt that the consumer has in its prefix cache is answered alike, encoding nothing."""
    producer, consumer = pair
    body = bodies["photo"]
    first = decode(consumer, body, encode(producer, body))
    before, encoded = metrics(consumer.url), encoded_pictures(consumer.url)
    again = decode(consumer, body, encode(producer, body))
    hits = "vllm:prefix_cache_hits_total"
    after = settled_metrics(consumer.url, wanted=hits, above=before[hits])
    assert growth(before, after, hits) > 0
    assert again.token_ids == first.token_ids == reference(body).token_ids
    assert encoded_pictures(consumer.url) == encoded


def test_the_transfer_is_booked(
    pair: list[Server],
    bodies: dict[str, Body],
    encode: Callable[[Server, Body], Body],
    decode: Callable[[Server, Body, Body], Answer],
) -> None:
    """Both engines' metrics tell of it: how it ended, its bytes, and its time."""
    decode(pair[1], bodies["photo"], encode(pair[0], bodies["photo"]))
    for server in pair:

        def booked(server: Server = server) -> bool:
            # What an agent did is published with a later step of its engine.
            decode(server, bodies["text"], {})
            return metrics(server.url).get("vllm:ec_pool_transfers_total", 0) >= 1

        assert eventually(booked, 30.0), server.name
        assert metrics(server.url)["vllm:ec_pool_transfer_time_seconds_total"] > 0
    fetched = metrics(pair[1].url)["vllm:ec_pool_fetched_bytes_total"]
    assert 0 < payload_received(pair[1].url) <= fetched  # what the pool had is fetched, not moved


def test_another_question_about_a_known_photo(
    pair: list[Server],
    bodies: dict[str, Body],
    encode: Callable[[Server, Body], Body],
    decode: Callable[[Server, Body, Body], Answer],
) -> None:
    """The producer announces again what it has, without encoding; the consumer loads it."""
    producer, consumer = pair
    body = bodies["photo"]
    content = [*body["messages"][0]["content"][:-1], {"type": "text", "text": "What else?"}]
    body = {**body, "messages": [{"role": "user", "content": content}]}
    encoded = encoded_pictures(producer.url), encoded_pictures(consumer.url)
    announced = encode(producer, body)
    assert count_announced(announced) == 1
    assert decode(consumer, body, announced).status == 200
    assert (encoded_pictures(producer.url), encoded_pictures(consumer.url)) == encoded


def test_many_requests_at_once(
    pair: list[Server],
    album: Album,
    encode: Callable[[Server, Body], Body],
    decode: Callable[[Server, Body, Body], Answer],
) -> None:
    """Ten different photos at once each get the answer that each gets alone."""
    producer, consumer = pair
    asked = [chat_body([photo], "What is to be seen?") for photo in album.photos(10)]
    encoded = encoded_pictures(consumer.url)

    def through(body: Body) -> Answer:
        return decode(consumer, body, encode(producer, body))

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(through, asked))
    assert encoded_pictures(consumer.url) == encoded
    assert len({tuple(answer.token_ids) for answer in answers}) == len(asked)
    alone = [ask(consumer.url, body) for body in asked]
    assert [one.token_ids for one in answers] == [one.token_ids for one in alone]
