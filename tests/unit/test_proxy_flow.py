# SPDX-License-Identifier: Apache-2.0
"""How the router spreads a request over servers, on real sockets between fake servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="the proxy extra is not installed")
pytest.importorskip("uvicorn", reason="the proxy extra is not installed")
pytest.importorskip("starlette", reason="the proxy extra is not installed")
pytest.importorskip("prometheus_client", reason="the proxy extra is not installed")

from aiohttp import web  # noqa: E402

from ec_connector.proxy.options import Address  # noqa: E402
from tests.router.net import (  # noqa: E402
    answering,
    entry,
    image,
    network,
    never,
    request,
    run,
)  # fmt: skip

GRID = {"image_grid_thw": [1, 4, 4]}


async def encoding(received: web.Request) -> web.Response:
    """Announces each part by its uuid, or else by its URL, and backwards."""
    parts = (await received.json())["messages"][0]["content"]
    params: dict[str, Any] = {}
    for index, part in reversed(list(enumerate(parts))):
        key = part.get("uuid") or f"hash of {part['image_url']['url']}"
        params.setdefault(key, entry())["item_indices"].append(index)
    return web.json_response({"choices": [], "ec_transfer_params": params})


def contents(body: Any) -> list[Any]:
    return [part for message in body["messages"] for part in message["content"]]


def test_images_go_to_several_encoders_at_once_and_come_back_in_order() -> None:
    """Each encoder waits until the other has its batch too; the decoder sees one announcement."""
    both = asyncio.Barrier(2)

    async def together(received: web.Request) -> web.Response:
        await both.wait()
        return await encoding(received)

    names = [f"picture{number}" for number in range(32)] + ["picture3", "picture0"]

    async def test() -> None:
        async with network([together, together], [answering]) as net:
            async with net.chat(request(*map(image, names), mm_processor_kwargs={})) as response:
                assert response.status == 200
            (first,), (second,) = (fake.bodies for fake in net.encoders)
            assert len(contents(first)) + len(contents(second)) == 32  # each content once
            assert first["mm_processor_kwargs"] == {}
            uuid = {
                part["image_url"]["url"].partition(",")[2]: part["uuid"]
                for part in (*contents(first), *contents(second))
            }
            (sent,) = net.decoder.bodies
            assert [part.get("uuid") for part in contents(sent)[:-1]] == [uuid[n] for n in names]
            params = sent["ec_transfer_params"]
            assert {key: found["item_indices"] for key, found in params.items()} == {
                uuid[name]: [place for place, one in enumerate(names) if one == name]
                for name in set(names)
            }
            assert await net.metric("vllm:ec_proxy_items_replaced_total") == 34

    run(test)


def test_same_picture_goes_to_the_same_encoder() -> None:
    """Also beside others, and in another request."""

    async def test() -> None:
        async with network([encoding] * 3, [answering]) as net:
            for body in (request(image("a")), request(image("b"), image("a")), request(image("a"))):
                async with net.chat(body) as response:
                    assert response.status == 200
            holding = [fake for fake in net.encoders if '"data:image/png;base64,a"' in
                       json.dumps(fake.bodies)]  # fmt: skip
            assert len(holding) == 1

    run(test)


def test_failure_of_one_encoder_keeps_the_others_items() -> None:
    """The media stays on the request, and what was encoded is announced with its places."""

    async def some(received: web.Request) -> web.Response:
        if "picture0" in await received.text():
            return web.Response(status=500)
        return await encoding(received)

    names = [f"picture{number}" for number in range(32)]

    async def test() -> None:
        async with network([some, some], [answering]) as net:
            async with net.chat(request(*map(image, names))) as response:
                assert response.status == 200
            (sent,) = net.decoder.bodies
            urls = [part["image_url"]["url"] for part in contents(sent)[:-1]]
            assert urls == [image(name)["image_url"]["url"] for name in names]
            params = sent["ec_transfer_params"]
            assert 0 < len(params) < 32
            for uuid, found in params.items():
                (place,) = found["item_indices"]
                assert contents(sent)[place]["uuid"] == uuid

    run(test)


def test_pictures_behind_urls_get_no_uuid_of_the_routers() -> None:
    """What is there may change: the encoder downloads and names it, the decoder never looks."""
    url = "http://pictures/1.png"
    part = {"type": "image_url", "image_url": {"url": url}}

    async def test() -> None:
        async with network([encoding], [answering]) as net:
            async with net.chat(request(part)) as response:
                assert response.status == 200
            assert contents(net.encoder.bodies[0]) == [part]
            stand_in = {"type": "image_embeds", "image_embeds": GRID, "uuid": f"hash of {url}"}
            assert contents(net.decoder.bodies[0])[0] == stand_in

    run(test)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "what?"},
                            {"type": "input_image", "image_url": "data:image/png;base64,a"},
                        ],
                    }
                ]
            },
        ),
        (
            "messages",
            {
                "max_tokens": 5,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": "a",
                                },
                            }
                        ],
                    }
                ],
            },
        ),
    ],
)
def test_media_of_the_other_routes_is_encoded_too(path: str, body: dict[str, Any]) -> None:
    """As a chat request; the decoder gets the announcement beside the media."""
    body = {"model": "m", **body}

    async def test() -> None:
        async with network([encoding], [answering]) as net:
            async with net.client.post(f"{net.url}/v1/{path}", json=body) as response:
                assert response.status == 200
            assert net.encoder.targets == ["/v1/chat/completions"]
            assert net.encoder.bodies[0] == {
                "model": "m",
                "messages": [{"role": "user", "content": [image("a")]}],
                "stream": False,
                "max_tokens": 1,
            }
            found = {"hash of data:image/png;base64,a": entry(0)}
            assert net.decoder.bodies == [{**body, "ec_transfer_params": found}]

    run(test)


def test_data_parallel_ranks_are_addressed() -> None:
    """Requests spread over the ranks of a server, in a header that is not the client's."""

    async def test() -> None:
        async with network([encoding], [answering]) as inner:
            encode = (Address(inner.encoder.url, ranks=2),)
            decode = (Address(inner.decoder.url, ranks=2),)
            async with network([], [], encode=encode, decode=decode) as net:
                for number in range(32):
                    body = request(image(f"picture{number}"))
                    headers = {"X-data-parallel-rank": "7"}
                    async with net.chat(body, headers=headers) as response:
                        assert response.status == 200
            for fake in (inner.encoder, inner.decoder):
                ranks = [headers.getall("X-Data-Parallel-Rank") for headers in fake.headers]
                assert sorted(set(map(tuple, ranks))) == [("0",), ("1",)]

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_prefill_and_decode_apart(stream: bool) -> None:
    """Announcement and one token to the prefill server, its KV parameters to the decoder."""
    kv = {"remote_engine_id": "e", "remote_host": "10.0.0.9", "remote_port": 1}

    async def prefilled(_request: web.Request) -> web.Response:
        return web.json_response({"choices": [], "kv_transfer_params": kv})

    async def decoded(_request: web.Request) -> web.Response:
        return web.json_response({"choices": ["x"], "kv_transfer_params": kv})

    async def test() -> None:
        async with network([encoding], [decoded], [prefilled]) as net:
            body = request(image("a"), stream=stream, max_completion_tokens=9, min_tokens=3)
            async with net.chat(body, headers={"X-Request-Id": "r"}) as response:
                assert response.status == 200
                assert await response.json() == {"choices": ["x"]}
            (first,), (second,) = net.prefills[0].bodies, net.decoder.bodies
            assert (first["max_tokens"], first["stream"]) == (1, False)
            assert first["kv_transfer_params"]["do_remote_decode"] is True
            assert first["ec_transfer_params"]
            assert not {"max_completion_tokens", "min_tokens"} & set(first)
            assert second == {**body, "messages": first["messages"], "kv_transfer_params": kv}
            for fake in (net.encoder, net.prefills[0], net.decoder):
                assert fake.headers[0]["X-Request-Id"] == "r"

    run(test)


def test_loads_count_what_is_under_way() -> None:
    """A second request goes to the decoder that has none."""

    async def test() -> None:
        async with network([never], [never, never]) as net:
            calls = [asyncio.create_task(net.chat(request()).__aenter__()) for _ in range(2)]
            for fake in net.decoders:
                await fake.entered.wait()
            async with net.client.get(f"{net.url}/instances") as response:
                described = (await response.json())["instances"]
            assert [one["load"] for one in described if one["role"] == "decode"] == [1, 1]
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)

    run(test)
