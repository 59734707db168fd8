# SPDX-License-Identifier: Apache-2.0
"""An encoder that is not vLLM feeds a vLLM: the tiny LLaVA's vision tower as an ONNX graph.

Tokens are compared with those of the same engine when it encodes by itself, which it does for
a picture under another identifier. All compute in float32: the rows of ONNX Runtime and torch
then differ by rounding alone (tests/unit/test_encoder_export.py says how little), while in
bfloat16 each would round at other places, and a token that is as good as another could change.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ec_connector.demo.chat import Answer, Body, ask, chat_body
from ec_connector.demo.questions import PROMPT, Album
from ec_connector.demo.readings import encoded_pictures
from ec_connector.demo.servers import Server, free_ports

if TYPE_CHECKING:
    from tests.e2e.conftest import Fleet

pytest.importorskip("onnx", reason="onnx writes the graph; it is in the test extra")
pytest.importorskip("onnxruntime", reason="onnxruntime runs the graph; it is in the test extra")

EXPORT = Path(__file__).resolve().parents[2] / "examples" / "onnx-encoder" / "export.py"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.leaves("the engines are shared by all tests"),
]


@pytest.fixture(scope="module")
def consumer(fleet: Fleet) -> Server:
    """The vLLM that decodes."""
    (one,) = fleet.need("consumer-llava")
    return one


@pytest.fixture(scope="module")
def encoder(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The encoder, with a worker of its own."""
    checkpoint, graph = fleet.models["llava"], tmp_path_factory.mktemp("graph") / "vision.onnx"
    export = [sys.executable, str(EXPORT), str(checkpoint), str(graph)]
    done = subprocess.run(export, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "ec_connector.encoder", "--graph", str(graph)]
    command += ["--processor", str(checkpoint), "--port", str(port), "--dtype", "float32"]
    command += ["--config", '{"pool_size": "64MiB"}']
    server = fleet.servers.start("encode-server", command, port=port)
    fleet.servers.wait_healthy([server])
    yield server
    fleet.servers.stop([server])


def by_itself(body: Body) -> Body:
    """The same question about pictures that nobody has encoded under these names."""
    own = copy.deepcopy(body)
    for number, part in enumerate(own["messages"][0]["content"]):
        if part["type"] == "image_url":
            part["uuid"] = f"by-itself-{number}-{part['image_url']['url'][-24:-4]}"
    return own


def test_tokens_are_those_of_the_engine_itself(
    album: Album,
    consumer: Server,
    encoder: Server,
    encode: Callable[[Server, Body], Body],
    decode: Callable[[Server, Body, Body], Answer],
) -> None:
    """One picture, two kinds of files, the same twice, a client's identifier: no encoding by vLLM.

    That the consumer finds an item shows that both sides came to the same identifier.
    """
    jpeg, png, again, named = album.photos(4)
    bodies = [chat_body(files, PROMPT) for files in ([jpeg], [jpeg, png], [again, again], [named])]
    bodies[-1]["messages"][0]["content"][0]["uuid"] = "named by the client"
    for body in bodies:
        announced = encode(encoder, body)
        assert all(entry["peer_port"] for entry in announced.values())
        before = encoded_pictures(consumer.url)
        answer = decode(consumer, body, announced)
        assert answer.status == 200, answer.error
        assert encoded_pictures(consumer.url) == before
        expected = ask(consumer.url, by_itself(body))
        assert encoded_pictures(consumer.url) > before
        assert answer.token_ids == expected.token_ids != []
    assert "named by the client" in announced


def test_the_router_cannot_tell_it_from_a_vllm(
    album: Album, fleet: Fleet, consumer: Server, encoder: Server
) -> None:
    """Router, encoder and consumer together: the answer streams, vLLM's encoder stays idle."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "ec_connector.proxy", "--encode", encoder.url]
    command += ["--decode", consumer.url, "--port", str(port)]
    router = fleet.servers.start("router", command, port=port)
    fleet.servers.wait_healthy([router])
    try:
        body = chat_body(album.photos(2), PROMPT)
        before = encoded_pictures(consumer.url)
        answer = ask(router.url, body)
        assert answer.status == 200, answer.error
        assert encoded_pictures(consumer.url) == before
        assert answer.token_ids == ask(consumer.url, by_itself(body)).token_ids != []
    finally:
        fleet.servers.stop([router])
