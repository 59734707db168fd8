# SPDX-License-Identifier: Apache-2.0
"""Producers that are not what the consumer is: nothing of theirs is loaded, and the log says why.

Every answer must still be right: the media is on the request, so the consumer encodes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ec_connector.demo.chat import Answer, Body, chat_body
from ec_connector.demo.models import make_qwen2_vl
from ec_connector.demo.questions import Album
from ec_connector.demo.readings import encoded_pictures, rpc
from ec_connector.demo.servers import Server
from tests.e2e.watch import by_reason, eventually, post

SMALL = (224, 224)


def body_named(album: Album, name: str) -> Body:
    """A request for one small photo that carries an identifier of the client's own."""
    body = chat_body([album.photo(*SMALL)], "What is to be seen?")
    # So that both sides name the item alike, whatever model they think it is for.
    body["messages"][0]["content"][0]["uuid"] = f"photo-for-{name}"
    return body


@pytest.fixture(scope="module")
def bodies(album: Album, reference: Callable[[Body], Answer]) -> dict[str, Body]:
    """A request for each way to differ; the reference has answered all of them."""
    made = {name: body_named(album, name) for name in ("dtype", "model", "options", "weights")}
    for body in made.values():
        reference(body)
    return made


@pytest.fixture
def retrained(fleet: Any, tmp_path: Path) -> Iterator[None]:
    """Other weights under the same model path, put back afterwards."""
    weights = next(fleet.models["qwen"].glob("*.safetensors"))
    kept = shutil.copy(weights, tmp_path / "kept")
    other = make_qwen2_vl(tmp_path / "other", seed=7)
    shutil.copy(other / weights.name, weights)
    yield
    shutil.copy(kept, weights)


def refused(
    way: str,
    reason: str,
    words: str,
    fleet: Any,
    bodies: dict[str, Body],
    reference: Callable[[Body], Answer],
    encode: Callable[[Server, Body], Body],
    decode: Callable[[Server, Body, Body], Answer],
) -> None:
    """What is the same for all: announced, refused with the factor named, answered rightly."""
    consumer, producer = fleet.need("consumer", f"producer-{way}")
    body = bodies[way]
    announced = encode(producer, body)
    (entry,) = announced.values()
    assert entry["peer_port"]
    encoded = encoded_pictures(consumer.url)
    before = by_reason(consumer.url, "fallback_items").get(reason, 0)
    answer = decode(consumer, body, announced)
    assert answer.token_ids == reference(body).token_ids
    assert encoded_pictures(consumer.url) == encoded + 1
    assert eventually(
        lambda: by_reason(consumer.url, "fallback_items").get(reason, 0) == before + 1, 5.0
    )
    log = consumer.log.read_text(errors="replace")
    assert any(words in line and reason in line for line in log.splitlines())


def test_other_dtype(fleet: Any, bodies: Any, reference: Any, encode: Any, decode: Any) -> None:
    """float32 rows for a bfloat16 model are not even asked for."""
    refused("dtype", "mismatch", "dtype", fleet, bodies, reference, encode, decode)


def test_other_options(fleet: Any, bodies: Any, reference: Any, encode: Any, decode: Any) -> None:
    """Other processor options give other rows under the same identifier."""
    words = "mm_processor_kwargs differs"
    refused("options", "incompatible", words, fleet, bodies, reference, encode, decode)


def test_other_model(fleet: Any, bodies: Any, reference: Any, encode: Any, decode: Any) -> None:
    """Another model's rows of the same shape."""
    refused("model", "incompatible", "model differs", fleet, bodies, reference, encode, decode)


@pytest.mark.usefixtures("retrained")
def test_other_weights(fleet: Any, bodies: Any, reference: Any, encode: Any, decode: Any) -> None:
    """The same model path, trained further: only the weights' digest can tell."""
    fleet.need("consumer")
    refused("weights", "incompatible", "weights differs", fleet, bodies, reference, encode, decode)


def test_weights_changed_in_place(
    fleet: Any, album: Album, tmp_path: Path, encode: Any, decode: Any
) -> None:
    """Neither side takes what the other weights made, until both have the same ones again."""
    producer, consumer = fleet.need("producer", "consumer")
    other = make_qwen2_vl(tmp_path / "other", seed=11)
    encoded_pictures(consumer.url)

    def reload(server: Server, folder: Path) -> None:
        rpc(server.url, "reload_weights", weights_path=str(folder))
        for cache in ("mm", "prefix"):
            post(f"{server.url}/reset_{cache}_cache")

    def answered(*, here: int) -> tuple[list[int], Body, Body]:
        body = chat_body([album.photo(*SMALL)], "What is to be seen?")
        announced = encode(producer, body)
        before = encoded_pictures(consumer.url)
        answer = decode(consumer, body, announced)
        assert encoded_pictures(consumer.url) == before + here
        return answer.token_ids, body, announced

    _, body, old = answered(here=0)
    try:
        reload(producer, other)
        answered(here=1)
        log = consumer.log.read_text(errors="replace")
        assert "weights differs" in log
        reload(consumer, other)
        tokens, same, _ = answered(here=0)
        post(f"{consumer.url}/reset_encoder_cache")
        assert decode(consumer, same, {}).token_ids == tokens
        # The picture of before is in neither pool any more.
        before = encoded_pictures(consumer.url)
        assert decode(consumer, body, old).status == 200
        assert encoded_pictures(consumer.url) == before + 1
    finally:
        for server in (producer, consumer):
            reload(server, fleet.models["qwen"])
    answered(here=0)
