# SPDX-License-Identifier: Apache-2.0
"""The router before two encoders and a decoder, asked by the official client."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="the client that is tested; in the test extra")

from ec_connector.demo.chat import Body, ask, chat_body  # noqa: E402
from ec_connector.demo.questions import Album  # noqa: E402
from ec_connector.demo.readings import encoded_pictures, metrics, settled_metrics  # noqa: E402
from ec_connector.demo.servers import Server, free_ports  # noqa: E402
from ec_connector.proxy.instances import Instances, Role  # noqa: E402
from ec_connector.proxy.media import CHAT, identified, items  # noqa: E402
from ec_connector.proxy.placement import by_key  # noqa: E402

TEXT = "What is to be seen?"
REPLACED = "vllm:ec_proxy_items_replaced_total"
REGISTERS_SECONDS = 30
LONG = 600
"""Tokens of an answer that is still being made when its decoder is stopped."""
PLACED_SECONDS = 60
TOLD = "vllm:ec_proxy_ahead_hints_total"
HITS = "vllm:ec_pool_hit_items_total"
LISTENS_SECONDS = 30
TRIES = 5


@dataclass
class World:
    """Two encoders, a decoder that registers itself, the router before them, and its client."""

    encoders: list[Server]
    decoder: Server
    router: Server
    client: Any
    model: str

    def answer(self, body: Body, *, stream: bool) -> str:
        """What the official client makes of the router's answer."""
        if stream:
            return "".join(self.stream(body))
        got = self._ask(body, stream=False)
        text: str = got.choices[0].message.content
        return text

    def stream(self, body: Body) -> Iterator[str]:
        """The same, piece by piece; none is empty."""
        for chunk in self._ask(body, stream=True):
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content

    def _ask(self, body: Body, *, stream: bool) -> Any:
        known = {name: body[name] for name in ("messages", "max_tokens", "temperature")}
        extra = {"ignore_eos": True, "return_token_ids": True}
        return self.client.chat.completions.create(
            model=self.model, stream=stream, extra_body=extra, **known
        )

    def reference(self, body: Body) -> str:
        """What an engine answers that encodes by itself and was not asked by the router."""
        answer = ask(self.encoders[1].url, body)
        assert answer.status == 200, answer.error
        return answer.text

    def encoder_of(self, body: Body) -> Server:
        """Where the router sends the one picture of a request, as long as nothing is busy."""
        instances = Instances()
        for encoder in self.encoders:
            instances.add(Role.ENCODE, encoder.url)
        (item,) = items(CHAT, identified(body))
        target = by_key(item.key, instances.targets(Role.ENCODE))
        return next(one for one in self.encoders if one.url == target.instance.url)


def start_router(fleet: Any, port: int, *options: str) -> Server:
    """A router that lives; it may know of no decoder yet."""
    command = [sys.executable, "-m", "ec_connector.proxy", "--port", str(port), *options]
    router: Server = fleet.servers.start("router", command, port=port)
    fleet.servers.wait_healthy([router], timeout=30)
    return router


def ready(router: Server) -> bool:
    """Whether it has a decoder that serves."""
    try:
        with urllib.request.urlopen(f"{router.url}/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        with error:
            return False


def states(router: Server) -> dict[str, dict[str, Any]]:
    """The router's own view of its servers, by URL; of one with two roles, the decoder."""
    with urllib.request.urlopen(f"{router.url}/instances", timeout=10) as answer:
        return {one["url"]: one for one in json.load(answer)["instances"]}


@pytest.fixture(scope="module")
def world(fleet: Any) -> Iterator[World]:
    """The second encoder is also the engine that answers alone."""
    producer, both, consumer = fleet.need("producer", "both-open", "consumer")
    for server in (producer, both, consumer):
        encoded_pictures(server.url)
    router = start_router(
        fleet, fleet.router_port, "--encode", producer.url, both.url,
        "--register-token", str(fleet.router_token),
    )  # fmt: skip
    registers = time.monotonic() + REGISTERS_SECONDS
    while not ready(router):
        assert time.monotonic() < registers, router.tail() + consumer.tail()
        time.sleep(0.1)
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        yield World([producer, both], consumer, router, client, model.id)
    fleet.servers.stop([router])


@dataclass
class Pictures:
    """Serves files by HTTP and counts how often each is asked for."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def pictures() -> Iterator[Pictures]:
    """On a free port of this machine."""
    shelf = Pictures()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shelf.asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(shelf.files[self.path])))
            self.end_headers()
            self.wfile.write(shelf.files[self.path])

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the test looks at ``asked``."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        shelf.url = f"http://127.0.0.1:{server.server_port}"
        yield shelf
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("count", [0, 1, 3], ids=["text", "picture", "three-pictures"])
def test_answer_is_that_of_one_vllm(count: int, stream: bool, world: World, album: Album) -> None:
    """Pictures in the request: each is encoded once, and never by the decoder."""
    body = chat_body([album.photo(224, 224) for _ in range(count)], TEXT)
    before = [encoded_pictures(one.url) for one in (*world.encoders, world.decoder)]
    replaced = metrics(world.router.url)[REPLACED]

    text = world.answer(body, stream=stream)

    after = [encoded_pictures(one.url) for one in (*world.encoders, world.decoder)]
    assert sum(after) - sum(before) == count
    assert after[-1] == before[-1]
    assert metrics(world.router.url)[REPLACED] - replaced == count
    assert text == world.reference(body)


def test_picture_behind_a_url_is_downloaded_once(
    world: World, album: Album, pictures: Pictures
) -> None:
    """By the encoder; the decoder gets metadata in its place."""
    pictures.files["/one.jpg"] = album.photo(224, 224).read_bytes()
    body = chat_body([], TEXT)
    part = {"type": "image_url", "image_url": {"url": f"{pictures.url}/one.jpg"}}
    body["messages"][0]["content"].insert(0, part)
    before = encoded_pictures(world.decoder.url)

    text = world.answer(body, stream=True)

    assert pictures.asked == ["/one.jpg"]
    assert encoded_pictures(world.decoder.url) == before
    assert text == world.reference(body)


def test_same_picture_goes_to_the_same_encoder(world: World, album: Album) -> None:
    """Three different questions, one encoding in all."""
    photo = album.photo(224, 224)
    before = sum(encoded_pictures(one.url) for one in (*world.encoders, world.decoder))
    for text in ("What is it?", "Where is it?", "Whose is it?"):
        world.answer(chat_body([photo], text), stream=False)
    after = sum(encoded_pictures(one.url) for one in (*world.encoders, world.decoder))
    assert after - before == 1


def test_rows_are_there_before_they_are_asked_for(world: World, album: Album) -> None:
    """The decoder's agent fetches what the router names; the engine finds it in its pool.

    An engine that asks while they are on their way is as right, so it has some tries.
    """
    deadline = time.monotonic() + LISTENS_SECONDS
    for _ in range(TRIES):
        told = metrics(world.router.url)[TOLD]
        hits = metrics(world.decoder.url).get(HITS, 0.0)
        body = chat_body([album.photo(224, 224) for _ in range(3)], TEXT)
        assert world.answer(body, stream=False) == world.reference(body)
        while metrics(world.router.url)[TOLD] == told:
            assert time.monotonic() < deadline, "the decoder's agent does not listen"
            world.answer(chat_body([album.photo(224, 224)], TEXT), stream=False)
        if settled_metrics(world.decoder.url, wanted=HITS, above=hits).get(HITS, 0.0) > hits:
            return
    raise AssertionError("nothing was in the decoder's pool when its engine asked")


def test_encoder_killed_in_mid_request(world: World, album: Album, fleet: Any) -> None:
    """It is stopped with the request in hand, then killed: the other one encodes."""
    victim = world.encoders[0]
    body = chat_body([album.photo(224, 224)], TEXT)
    while world.encoder_of(body) is not victim:
        body = chat_body([album.photo(224, 224)], TEXT)
    before = encoded_pictures(world.decoder.url)
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(world.answer, body, stream=True)
            while not states(world.router)[victim.url]["load"] and not answer.done():
                time.sleep(0.02)
            assert not answer.done()
            for pid in victim.processes():
                os.kill(pid, signal.SIGKILL)
            text = answer.result(60)
    finally:
        for pid in victim.processes():
            os.kill(pid, signal.SIGKILL)
        victim.process.wait()
        fleet.stop("producer")
    assert encoded_pictures(world.decoder.url) == before
    assert text == world.reference(body)
    after = chat_body([album.photo(224, 224)], TEXT)
    assert world.answer(after, stream=False) == world.reference(after)


def test_decoder_killed_in_mid_answer(world: World, album: Album, fleet: Any) -> None:
    """Each decoder streams an answer, and one stops in its first words; two more requests wait.

    With one decoder its own answer breaks off and its own waiting request is refused; what the
    other one has in hand ends as it should.
    """
    other, victim = fleet.need("both-open", "consumer")
    (port,) = free_ports(1)
    router = start_router(fleet, port, "--encode", other.url, "--decode", victim.url, other.url)
    long = [chat_body([album.photo(224, 224)], TEXT, max_tokens=LONG) for _ in range(2)]
    short = [chat_body([album.photo(224, 224)], TEXT) for _ in range(2)]
    with (
        openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        through = World(world.encoders, victim, router, client, world.model)
        streams = [through.stream(body) for body in long]
        try:
            begun = [next(streams[0])]
            for pid in victim.processes():
                os.kill(pid, signal.SIGSTOP)
            begun.append(next(streams[1]))
            waiting = [pool.submit(through.answer, body, stream=False) for body in short]
            placed = time.monotonic() + PLACED_SECONDS
            while states(router)[victim.url]["load"] < 2:
                assert time.monotonic() < placed, "no request waits at the decoder that is stopped"
                time.sleep(0.02)
        finally:
            for pid in victim.processes():
                os.kill(pid, signal.SIGKILL)

        endings = [pool.submit("".join, stream) for stream in streams]
        outcomes = [future.exception(60) for future in (*endings, *waiting)]
        victim.process.wait()
        fleet.stop("consumer")
        assert [error is None for error in outcomes[:2]].count(True) == 1
        (broken,) = [error for error in outcomes[:2] if error is not None]
        # Or an error of the HTTP library that this version of the client is built on.
        assert isinstance(broken, openai.APIError) or type(broken).__name__ == "RemoteProtocolError"
        (refused,) = [error for error in outcomes[2:] if error is not None]
        assert isinstance(refused, openai.InternalServerError)
        assert refused.status_code == 502
        for body, start, ending in zip(long, begun, endings, strict=True):
            if ending.exception() is None:
                assert start + ending.result() == world.reference(body)
        for body, answer in zip(short, waiting, strict=True):
            if answer.exception() is None:
                assert answer.result() == world.reference(body)
        assert through.answer(short[0], stream=True) == world.reference(short[0])
    fleet.servers.stop([router])
    left = time.monotonic() + REGISTERS_SECONDS
    while victim.url in states(world.router):
        assert time.monotonic() < left, "a registered engine that was killed is not forgotten"
        time.sleep(0.1)
