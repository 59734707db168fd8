# SPDX-License-Identifier: Apache-2.0
"""The router tells decoders' agents what they will be asked for, and waits for none of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the proxy extra is not installed")
pytest.importorskip("uvicorn", reason="the proxy extra is not installed")
pytest.importorskip("starlette", reason="the proxy extra is not installed")
pytest.importorskip("prometheus_client", reason="the proxy extra is not installed")

from aiohttp import web

from ec_connector.proxy.ahead import MAX_STREAMS, QUEUE, Stream, Streams
from ec_connector.proxy.instances import Instances, Role
from ec_connector.proxy.intake import RefusedError
from ec_connector.proxy.options import Address, Options
from ec_connector.proxy.registrar import Words
from ec_connector.proxy.serve import listen, server
from tests.router.net import (
    PATIENCE,
    Handler,
    Net,
    announcing,
    answering,
    entry,
    image,
    network,
    request,
    run,
)  # fmt: skip

TOKEN = "0123456789abcdef"
HINTS = "vllm:ec_proxy_ahead_hints_total"


def words(url: str = "http://d", engine: str = "a", serves: str = "decode") -> Words:
    return Words(url, [serves], engine)  # type: ignore[list-item] # one of the two


# ── which agents listen ──────────────────────────────────────────────────────


def test_one_agent_of_a_server_is_told() -> None:
    """Of several nobody knows which of them will be asked."""
    known = {"a", "b"}
    streams = Streams(lambda words: words.id in known)
    instances = Instances()
    (target,) = instances.add(Role.DECODE, "http://d").targets
    (rank, _) = instances.add(Role.DECODE, "http://r", 2).targets
    assert streams.of(target) is None
    one = streams.open(words())
    streams.open(words("http://r"))
    assert streams.of(target) is one
    assert streams.of(rank) is None
    two = streams.open(words(engine="b"))
    assert streams.of(target) is None
    known.discard("a")  # its host is gone: it says no more that it is there
    assert streams.of(target) is two
    streams.close(two)
    assert streams.of(target) is None


def test_a_later_connection_takes_over() -> None:
    """The earlier one of the same engine ends, and takes nothing away when it is closed."""
    streams = Streams(lambda _: True)
    first = streams.open(words())
    second = streams.open(words())
    assert first.ended
    streams.close(first)
    assert len(streams) == 1
    streams.close(second)
    assert len(streams) == 0


@pytest.mark.parametrize(
    ("said", "known", "status"), [(words(serves="encode"), True, 400), (words(), False, 409)]
)
def test_who_may_listen(said: Words, known: bool, status: int) -> None:
    """A decoder's agent that is registered."""
    with pytest.raises(RefusedError) as raised:
        Streams(lambda _: known).open(said)
    assert raised.value.status == status


def test_their_number_is_bounded() -> None:
    """And one that comes again is none more."""
    streams = Streams(lambda _: True)
    for number in range(MAX_STREAMS):
        streams.open(words(engine=str(number)))
    streams.open(words(engine="0"))
    with pytest.raises(RefusedError, match="1024 agents listen"):
        streams.open(words(engine="one more"))


def test_what_waits_is_bounded() -> None:
    """What a slow agent has not taken; its end is seen all the same."""

    async def test() -> None:
        stream = Stream(words())
        assert all(stream.offer(b"x\n") for _ in range(QUEUE))
        assert not stream.offer(b"y\n")
        stream.end()
        assert await stream.next(PATIENCE) == b"x\n" * QUEUE
        assert await stream.next(0.0) == b""
        assert stream.ended

    run(test)


# ── with a real router ───────────────────────────────────────────────────────


@pytest.fixture
def token(tmp_path: Path) -> str:
    """A file with the token."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return str(path)


def spoken(net: Net, url: str, engine: str = "a", token: str = TOKEN) -> dict[str, Any]:
    """What an agent's requests carry."""
    said = {"url": url, "serves": ["decode"], "id": engine}
    return {"json": said, "headers": {"Authorization": f"Bearer {token}"}}


@contextlib.asynccontextmanager
async def listening(net: Net, url: str, engine: str = "a") -> AsyncIterator[Any]:
    """An agent of this decoder that registers and listens, and has heard the first empty line."""
    said = spoken(net, url, engine)
    async with net.client.post(f"{net.url}/instances", **said) as response:
        assert response.status == 200
    async with net.client.post(f"{net.url}/instances/ahead", **said) as response:
        assert response.status == 200
        assert await response.content.readline() == b"\n"
        yield response


async def heard(response: Any) -> dict[str, Any]:
    """The next hint."""
    async with asyncio.timeout(PATIENCE):
        while (line := await response.content.readline()) == b"\n":
            pass
    hint: dict[str, Any] = json.loads(line)
    return hint


def held(params: object, until: asyncio.Event) -> Handler:
    """An encoder that answers when it may."""

    async def answer(_request: web.Request) -> web.Response:
        await until.wait()
        return web.json_response({"choices": [], "ec_transfer_params": params})

    return answer


def test_told_while_another_encoder_still_encodes(token: str) -> None:
    """And the request goes to the decoder whose agent was told, although another has as little."""

    async def test() -> None:
        goes_on = asyncio.Event()
        announced = [asyncio.Event() for _ in range(2)]

        async def encode(request: web.Request) -> web.Response:
            # Whichever is asked first answers at once, the other one when it may.
            mine = 0 if not announced[0].is_set() else 1
            announced[mine].set()
            if mine:
                await goes_on.wait()
            params = {f"h{mine}": entry(0, dtype="uint8")}
            return web.json_response({"choices": [], "ec_transfer_params": params})

        async with (
            network([encode, encode], [answering, answering], register_token=token) as net,
            listening(net, net.decoders[0].url) as one,
            listening(net, net.decoders[1].url, "b") as two,
        ):
            # Of so many pictures each encoder gets some.
            pictures = [image(f"{number}") for number in range(8)]
            asked = asyncio.create_task(net.chat(request(*pictures)).__aenter__())
            ears = [asyncio.create_task(heard(ear)) for ear in (one, two)]
            done, _ = await asyncio.wait(ears, return_when=asyncio.FIRST_COMPLETED)
            assert not goes_on.is_set()
            assert not any(decoder.bodies for decoder in net.decoders)
            (first,) = done
            assert first.result()["key"] == "h0"
            told = ears.index(first)
            text = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            async with net.chat(text) as response:  # meanwhile the other one has less
                assert response.status == 200
            assert [len(decoder.bodies) for decoder in net.decoders] == [told, 1 - told]
            goes_on.set()
            response = await asked
            assert response.status == 200
            response.release()
            assert len(net.decoders[told].bodies) == 1
            assert await heard((one, two)[told]) == {"key": "h1", **fetched(dtype="uint8")}
            for ear in ears:
                ear.cancel()
            await net.metric_becomes(f'{HINTS}{{outcome="told"}}', 2.0)

    run(test)


def fetched(**more: Any) -> dict[str, Any]:
    """What a hint says of :func:`entry`."""
    names = ("peer_host", "peer_port", "size_bytes", "shape")
    return {**{name: entry(0)[name] for name in names}, **more}


def test_a_decoder_that_fails_after_it_was_told(token: str) -> None:
    """A hint is only a hint: the request goes elsewhere, with its media."""

    async def failing(_request: web.Request) -> web.Response:
        return web.Response(status=500)

    async def test() -> None:
        async with (
            network(
                [announcing({"h": entry(0)})], [failing, answering], register_token=token
            ) as net,
            listening(net, net.decoders[0].url) as ear,
        ):
            async with net.chat(request(image("a"))) as response:
                assert response.status == 200
            assert (await heard(ear))["key"] == "h"
            first, second = net.decoders
            assert "ec_transfer_params" in first.bodies[-1]
            assert "ec_transfer_params" not in second.bodies[-1]

    run(test)


def test_an_agent_that_does_not_read(token: str) -> None:
    """Requests go on; what does not fit into its queue is dropped and counted."""

    async def test() -> None:
        # Far more than sockets, buffers and queue hold.
        params = {f"{number:04}": entry(0, ticket="0" * 7000) for number in range(2000)}
        async with (
            network([announcing(params)], [answering], register_token=token) as net,
            listening(net, net.decoder.url),
        ):
            async with net.chat(request(image("a"))) as response:
                assert response.status == 200
            assert await net.metric(f'{HINTS}{{outcome="told"}}') == QUEUE
            assert await net.metric(f'{HINTS}{{outcome="dropped"}}') == 2000 - QUEUE

    run(test)


def test_a_stream_that_broke(token: str) -> None:
    """Whoever went away is told nothing and costs nothing; it may come again."""

    async def test() -> None:
        async with network([announcing({"h": entry(0)})], [answering], register_token=token) as net:
            async with listening(net, net.decoder.url) as ear:
                ear.close()
            async with net.chat(request(image("a"))) as response:
                assert response.status == 200
            async with listening(net, net.decoder.url) as ear:
                async with net.chat(request(image("b"))) as response:
                    assert response.status == 200
                assert (await heard(ear))["key"] == "h"

    run(test)


def test_it_ends_with_the_registration(token: str) -> None:
    """An engine that has left is not listened to any more, and may not listen again."""

    async def test() -> None:
        async with network([announcing({"h": entry(0)})], [answering], register_token=token) as net:
            said = spoken(net, net.decoder.url)
            async with listening(net, net.decoder.url) as ear:
                async with net.client.delete(f"{net.url}/instances", **said) as response:
                    assert response.status == 200
                async with net.chat(request(image("a"))) as response:
                    assert response.status == 200
                assert await net.metric(f'{HINTS}{{outcome="told"}}') == 0
                ear.close()
            async with net.client.post(f"{net.url}/instances/ahead", **said) as response:
                assert response.status == 409

    run(test)


@pytest.mark.parametrize(
    ("given", "known", "status"), [(True, "x" * 16, 401), (True, "", 401), (False, TOKEN, 403)]
)
def test_strangers_do_not_listen(token: str, given: bool, known: str, status: int) -> None:
    """Without the token, and at a router that takes nobody."""

    async def test() -> None:
        options = {"register_token": token} if given else {}
        async with network([], [answering], **options) as net:
            said = spoken(net, net.decoder.url, token=known)
            async with net.client.post(f"{net.url}/instances/ahead", **said) as response:
                assert response.status == status
            async with net.client.post(f"{net.url}/instances/ahead", data=b" " * 5000) as response:
                assert response.status == 413

    run(test)


def test_prefill_servers_get_the_request_first(token: str) -> None:
    """They fetch, not the decoder: nobody is told."""

    async def test() -> None:
        async with (
            network(
                [announcing({"h": entry(0)})], [answering], [answering], register_token=token
            ) as net,
            listening(net, net.decoder.url),
        ):
            async with net.chat(request(image("a"))) as response:
                assert response.status == 200
            assert await net.metric(f'{HINTS}{{outcome="told"}}') == 0

    run(test)


def test_the_router_ends_although_agents_listen(token: str) -> None:
    """Their answers end first, so that nothing waits for them."""

    async def test() -> None:
        async with network([], [answering], register_token=token) as net:
            options = Options(decode=(Address(net.decoder.url),), register_token=token)
            router = server(options)
            with listen("127.0.0.1", 0) as listener:
                serving = asyncio.create_task(router.serve(sockets=[listener]))
                net.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                async with listening(net, net.decoder.url) as ear:
                    router.should_exit = True
                    async with asyncio.timeout(PATIENCE):
                        assert await ear.content.read() == b""
                        await serving

    run(test)
