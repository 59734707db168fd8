# SPDX-License-Identifier: Apache-2.0
"""The encoder that is not vLLM: real worker, real agent, real HTTP; a runtime in plain numpy."""

from __future__ import annotations

import base64
import http.client
import json
import os
import threading
import time
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image", reason="Pillow is in the extra encode-server")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is in the extra encode-server")
pytest.importorskip("starlette", reason="starlette is in the extra encode-server")

from ec_connector import Consumer, Producer  # noqa: E402
from ec_connector.encoder import main  # noqa: E402
from ec_connector.encoder.app import Encoder, build_app  # noqa: E402
from ec_connector.encoder.errors import RequestError  # noqa: E402
from ec_connector.encoder.identifiers import find_hasher, identifier  # noqa: E402
from ec_connector.encoder.identity import WEIGHTS, choose_dtype, factors  # noqa: E402
from ec_connector.encoder.pictures import pictures_of  # noqa: E402
from ec_connector.encoder.vision import Vision  # noqa: E402
from ec_connector.engine.checkpoint import weights_digest  # noqa: E402
from ec_connector.errors import ConfigError, IncompatibleError  # noqa: E402
from ec_connector.proxy.rewrite import encode_body  # noqa: E402
from ec_connector.stage.errors import StageError  # noqa: E402
from ec_connector.stage.process import OwnStage  # noqa: E402

HERE = Path(__file__).resolve().parent
MODEL = "acme/tiny-vl"
SMALL = {"pool_size": "16MiB"}


def png(colour):
    """A picture file."""
    file = BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "PNG")
    return file.getvalue()


def part(data, **more):
    """A part of a chat request."""
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}, **more}


def chat(*parts):
    """A chat request, as a client sends it."""
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 9, "stream": True}


def preprocess(image):
    """Three rows of four numbers: the first pixel's red."""
    return {"x": np.full((3, 4), image.getpixel((0, 0))[0], np.float64), "unused": np.zeros(1)}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes encoders whose graph does what its name says."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{HERE.parents[1]}")
    made = []

    def make(what="good", *, dtype="float32", timeout=20.0, processor=preprocess, known=None):
        file = tmp_path / "graph"
        file.write_text(what)

        def start():
            return OwnStage({"vision": file}, runtime="plain_runtime:Plain")

        vision = Vision(processor, start, "vision", dtype, timeout)
        made.append(vision)
        producer = Producer(factors=known or {"model": MODEL}, **SMALL)
        made.append(producer)
        return Encoder(vision, producer, MODEL, dtype, find_hasher("sha256")), file

    yield make
    for one in made:
        one.close()


@contextmanager
def served(encoder, max_body=1 << 20):
    """The encoder on a real socket: a function that posts a body or gets a path."""
    # libuv's loop would keep a pipe for as long as this process lives.
    app = build_app(encoder, max_body)
    config = uvicorn.Config(app, port=0, log_level="error", loop="asyncio")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        def ask(body=None, path="/v1/chat/completions"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                if body is None:
                    connection.request("GET", path)
                else:
                    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                    connection.request("POST", path, raw)
                response = connection.getresponse()
                text = response.read()
                return response.status, json.loads(text) if text else None
            finally:
                connection.close()

        yield ask
    finally:
        server.should_exit = True
        thread.join()


def test_a_request_is_answered_as_by_a_vllm(make):
    """Rows can be fetched under the identifiers of the answer; nothing is made twice."""
    encoder, _ = make()
    red, dark = png((200, 0, 0)), png((7, 0, 0))
    body = encode_body(chat(part(red), part(dark, uuid="mine"), part(red)))
    with served(encoder) as ask, Consumer(factors={"model": MODEL}, **SMALL) as consumer:
        status, answer = ask(body)
        assert status == 200
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": ""}
        params = answer["ec_transfer_params"]
        key = identifier(find_hasher("sha256"), MODEL, red, converted=False)
        assert list(params) == [key, "mine"]
        assert [entry["item_indices"] for entry in params.values()] == [[0, 2], [1]]
        assert params[key]["shape"] == [3, 4]
        for name, value in ((key, 400), ("mine", 14)):
            rows = consumer.fetch(name, params[name], timeout=10.0)
            assert np.array_equal(rows, np.full((3, 4), value, np.float32))
        assert ask(body)[1]["ec_transfer_params"] == params
        assert ask(encode_body(chat()))[1]["ec_transfer_params"] is None
        assert ask(path="/health")[0] == 200
        assert ask(path="/v1/models")[1]["data"][0]["id"] == MODEL
        stats = ask(path="/stats")[1]
        assert stats["encoder"] == {
            "requests": 3, "encoded": 2, "held": 2, "no_room": 0, "failed": 0,
        }  # fmt: skip
        assert stats["agent"]["saved"] == 2


def test_bfloat16(make):
    """numpy has no such type: its bytes are announced, and fetched, as what they are."""
    encoder, _ = make(dtype="bfloat16")
    params = encoder.announce(chat(part(png((5, 0, 0)), uuid="a")))
    assert params["a"]["dtype"] == "bfloat16"
    with Consumer(**SMALL) as consumer:
        rows = consumer.fetch("a", params["a"], timeout=10.0)
    assert np.array_equal((rows.astype(np.uint32) << 16).view(np.float32), np.full((3, 4), 10))


def test_a_consumer_of_another_model_is_refused(make):
    """By the factor that differs."""
    encoder, _ = make(known={"model": MODEL, "weights": "these"})
    params = encoder.announce(chat(part(png((5, 0, 0)), uuid="a")))
    with (
        Consumer(factors={"weights": "others"}, **SMALL) as consumer,
        pytest.raises(IncompatibleError) as refused,
    ):
        consumer.fetch("a", params["a"], timeout=10.0)
    assert refused.value.factor == "weights"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "messages is missing"),
        (chat({"type": "image_url", "image_url": {"url": "http://host/a.png"}}), "data: URL"),
        (chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}), "base64"),
        (chat({"type": "image_url"}), "without an image_url"),
        (chat(part(b"", uuid=5)), "a uuid that is no text"),
        (chat({"type": "audio_url", "audio_url": {"url": "data:,"}}), "not audio"),
        ({**chat(), "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs of a request"),
        ({**chat(), "media_io_kwargs": {"image": {}}}, "media_io_kwargs of a request"),
        (chat(*[part(b"")] * 257), "257 pictures exceed"),
    ],
)
def test_what_is_not_encoded(body, words):
    """Other media, addresses to fetch from, options that change the rows: said so."""
    with pytest.raises(RequestError, match=words) as refused:
        pictures_of(body)
    assert refused.value.status == 400


def test_bad_requests_over_http(make):
    """Each is a sentence and a 4xx, as OpenAI clients read it; the next request is served."""
    encoder, _ = make()
    good = chat(part(png((5, 0, 0))))
    with served(encoder, max_body=10_000) as ask:
        for body, status, words in (
            (b"no json", 400, "the body is no JSON"),
            ([], 400, "no JSON object"),
            (b" " * 10_001, 413, "exceeds 10000 bytes"),
            (chat(part(b"no picture")), 400, "cannot be decoded"),
            (chat(part(png((5, 0, 0)), uuid="half \ud800")), 400, "half of a character"),
            (chat(part(png((5, 0, 0)), uuid="long" * 2000)), 400, "a key of over"),
            (chat(part(png((5, 0, 0)), uuid="renderer0-mm-1-image-0")), 400, "request_local"),
        ):
            got, answer = ask(body)
            assert (got, words in answer["error"]["message"]) == (status, True)
        assert ask(good)[0] == 200


@pytest.mark.parametrize(
    ("what", "timeout", "status", "words"),
    [
        ("dies", 20.0, 500, "was ended by SIGKILL"),
        ("hangs", 0.7, 504, "longer than 0.7 s"),
        ("stops", 0.7, 504, "longer than 0.7 s"),
    ],
)
def test_a_worker_that_dies_or_hangs_is_replaced(make, what, timeout, status, words):
    """That request fails within its deadline, what was encoded stays, the next one is served."""
    encoder, file = make(timeout=timeout)
    kept = encoder.announce(chat(part(png((9, 0, 0)), uuid="kept")))["kept"]
    encoder.vision.close()
    file.write_text(what)
    time.sleep(1.0)  # a worker is not replaced more often than once a second
    with served(encoder) as ask, Consumer(**SMALL) as consumer:
        began = time.monotonic()
        got, answer = ask(chat(part(png((5, 0, 0)))))
        assert (got, words in answer["error"]["message"]) == (status, True)
        assert time.monotonic() - began < 15.0
        assert ask(path="/health")[0] == 503
        file.write_text("good")
        until = time.monotonic() + 20.0
        while (got := ask(chat(part(png((5, 0, 0)))))[0]) != 200 and time.monotonic() < until:
            assert got == 500  # not back yet
            time.sleep(0.2)
        assert got == 200
        assert ask(path="/health")[0] == 200
        assert consumer.fetch("kept", kept, timeout=10.0)[0, 0] == 18


def test_graphs_that_do_not_fit(make):
    """Inputs that the processor does not give, and rows that are none: by name."""
    encoder, _ = make(processor=lambda _: {"pixels": np.zeros(3)})
    with pytest.raises(StageError, match="takes x, but the processor gives pixels"):
        encoder.vision.encode(None)
    encoder, _ = make(processor=lambda _: {"x": np.zeros((0, 4))})
    with pytest.raises(StageError, match="rows of floating-point numbers are expected"):
        encoder.vision.encode(None)
    encoder, _ = make(processor=lambda _: {"x": np.full((1, 4), np.nan)})
    with pytest.raises(StageError, match="not finite in float32"):
        encoder.vision.encode(None)
    encoder, _ = make(processor=lambda _: {"x": np.full((1, 4), 60_000)}, dtype="float16")
    with pytest.raises(StageError, match="not finite in float16"):
        encoder.vision.encode(None)
    encoder, _ = make(processor=lambda _: {"x": np.zeros(4)})
    with pytest.raises(StageError, match=r"'x' has shape \[4\], not \[-1, 4\]"):
        encoder.vision.encode(None)


def test_no_room(make):
    """An item larger than the pool: announced without an address, so that its media stays."""
    encoder, _ = make("much")
    encoder.producer.close()
    with Producer(pool_size="4MiB") as small:
        encoder.producer = small
        params = encoder.announce(chat(part(png((5, 0, 0)), uuid="a")))
    assert params == {"a": {"metadata": {}, "modality": "image", "item_indices": [0]}}


def test_what_is_known_of_the_model(tmp_path, caplog):
    """Factors of the checkpoint and the graph; a graph of other weights is refused."""
    (tmp_path / "model.safetensors").write_bytes(os.urandom(64))
    digest = weights_digest(tmp_path)
    config = {"text_config": {"hidden_size": 8}, "dtype": "bfloat16"}
    assert choose_dtype("", config) == "bfloat16"
    assert choose_dtype("float32", config) == "float32"
    with pytest.raises(ConfigError, match="give --dtype"):
        choose_dtype("", {})
    known = factors(MODEL, "bfloat16", 32, config, tmp_path, {WEIGHTS: digest})
    assert known == {
        "model": MODEL, "dtype": "torch.bfloat16", "width_image": "32", "row_bytes": "16",
        "mm_processor_kwargs": {}, "media_io_kwargs": {}, "weights": digest,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="exported from other weights"):
        factors(MODEL, "bfloat16", 32, config, tmp_path, {WEIGHTS: "other"})
    assert "weights" not in factors(MODEL, "bfloat16", 32, config, tmp_path, {})
    assert "does not say of which weights" in caplog.text


def test_bad_usage(tmp_path, capsys):
    """Files that are not there and settings that are none: status 2, in a sentence."""
    graph = tmp_path / "graph"
    graph.touch()
    for options, words in (
        (["--graph", "/no/file", "--processor", str(tmp_path)], "is no file"),
        (["--graph", str(graph), "--processor", "/no/folder"], "is no folder"),
        (["--graph", str(graph), "--processor", str(tmp_path), "--config", '{"a": 1}'], "'a'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(options)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


def test_hash_names():
    """Another name than vLLM has is refused."""
    with pytest.raises(ConfigError, match="give blake3, sha256 or sha512"):
        find_hasher("md5")
