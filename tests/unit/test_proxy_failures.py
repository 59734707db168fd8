# SPDX-License-Identifier: Apache-2.0
"""What the router does when servers fail, on real sockets between fake servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="the proxy extra is not installed")
pytest.importorskip("uvicorn", reason="the proxy extra is not installed")
pytest.importorskip("starlette", reason="the proxy extra is not installed")
pytest.importorskip("prometheus_client", reason="the proxy extra is not installed")

from aiohttp import web  # noqa: E402

from ec_connector.proxy.media import identified  # noqa: E402
from ec_connector.proxy.options import Address  # noqa: E402
from tests.router.net import (  # noqa: E402
    PATIENCE,
    Handler,
    Net,
    announcing,
    answering,
    closed_port,
    entry,
    image,
    network,
    never,
    request,
    run,
)  # fmt: skip

ONE = {"h": entry(0)}
WITH_MEDIA = 'vllm:ec_proxy_decode_retries_total{kind="with_media"}'
ELSEWHERE = 'vllm:ec_proxy_decode_retries_total{kind="elsewhere"}'


def failing(status: int, message: str = "broke") -> Handler:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": message, "code": status}}, status=status)

    return answer


async def dying(received: web.Request) -> web.Response:
    assert received.transport is not None
    received.transport.abort()
    return web.Response()


def in_turn(*answers: Handler) -> Handler:
    """Answers the first request by the first of these, and so on; the last for all others."""
    left = list(answers)

    async def answer(received: web.Request) -> web.StreamResponse:
        return await (left.pop(0) if len(left) > 1 else left[0])(received)

    return answer


def events(*bodies: Any) -> Handler:
    async def answer(received: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(received)
        for body in bodies:
            await response.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        return response

    return answer


def has_media(body: Any) -> bool:
    return "data:image" in json.dumps(body)


async def states(net: Net) -> dict[str, str]:
    async with net.client.get(f"{net.url}/instances") as response:
        return {one["url"]: one["state"] for one in (await response.json())["instances"]}


async def becomes(net: Net, url: str, state: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await states(net))[url] != state:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("broken", [failing(500), failing(503), failing(429), dying, never])
def test_another_encoder_stands_in(broken: Handler) -> None:
    """Whichever of the two is asked first and fails or is slow, the other encodes."""

    async def test() -> None:
        answer = in_turn(broken, announcing(ONE))
        async with network([answer, answer], [answering], encode_timeout=0.2) as net:
            async with net.chat(request(image("a"))) as response:
                assert response.status == 200
            assert [len(one.bodies) for one in net.encoders] == [1, 1]
            assert net.decoder.bodies[0]["ec_transfer_params"] == ONE
            assert not has_media(net.decoder.bodies[0])
            assert await net.metric('vllm:ec_proxy_encodes_total{outcome="ok"}') == 1

    run(test)


def test_two_encoders_that_fail_leave_the_media() -> None:
    """No third is asked; the decoder gets the request as the client sent it."""

    async def test() -> None:
        async with network([failing(500)] * 3, [answering]) as net:
            async with net.chat(request(image("a"))) as response:
                assert response.status == 200
            assert sum(len(one.bodies) for one in net.encoders) == 2
            assert net.decoder.bodies == [request(image("a"))]
            # Both said 500 to the same request, so it may be the request.
            assert set((await states(net)).values()) == {"serving"}

    run(test)


def test_refused_media_is_not_sent_to_another_encoder() -> None:
    """All would say 400; the client gets what the decoder makes of it."""

    async def test() -> None:
        async with network([failing(400)] * 2, [failing(400, "bad image")]) as net:
            async with net.chat(request(image("a"))) as response:
                assert response.status == 400
                assert (await response.json())["error"]["message"] == "bad image"
            assert sum(len(one.bodies) for one in net.encoders) == 1

    run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [500, 400])
def test_error_of_the_decoder_is_followed_by_one_try_with_the_media(
    stream: bool, status: int
) -> None:
    """The client sees only the second answer; the identifiers of the first are not used again."""
    error = {"error": {"message": "Internal server error", "code": status}}
    broken = events(error) if stream else failing(status)
    good = events({"choices": ["ok"]}) if stream else answering

    async def test() -> None:
        async with network([announcing(ONE)], [in_turn(broken, good)]) as net:
            body = request(image("a"), stream=stream)
            async with net.chat(body) as response:
                assert response.status == 200
                assert b"error" not in await response.read()
            first, second = net.decoder.bodies
            assert not has_media(first)
            assert second == body
            assert await net.metric(WITH_MEDIA) == 1

    run(test)


def test_second_error_is_the_clients() -> None:
    """Whatever the decoder says to the request with its media is the answer."""

    async def test() -> None:
        async with network(
            [announcing(ONE)], [in_turn(failing(500), failing(500, "twice"))]
        ) as net:
            async with net.chat(request(image("a"))) as response:
                assert response.status == 500
                assert (await response.json())["error"]["message"] == "twice"
            assert len(net.decoder.bodies) == 2

    run(test)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (request(), failing(500)),  # nothing was encoded
        (request(image("a")), failing(503)),  # overloaded, not missing anything
        (request(image("a"), stream=True), events({"choices": []}, {"error": {"code": 500}})),
    ],
)
def test_other_errors_are_not_tried_again(body: dict[str, Any], answer: Handler) -> None:
    """Nor is one that comes after the first event, which the client has by then."""

    async def test() -> None:
        async with network([announcing(ONE)], [answer]) as net:
            async with net.chat(body) as response:
                await response.read()
            assert len(net.decoder.bodies) == 1
            assert await net.metric(WITH_MEDIA) == 0

    run(test)


def test_decoder_that_is_not_reached_is_passed_over() -> None:
    """Nothing was sent, so another one gets the request; after three failures it is out."""

    async def test() -> None:
        down = closed_port()
        async with network([never], [answering]) as net:
            urls = (Address(down), Address(net.decoder.url))
            async with network([never], [], decode=urls) as second:
                for _ in range(8):
                    async with second.chat(request()) as response:
                        assert response.status == 200
                assert (await states(second))[down] == "out"
                assert 3 <= await second.metric(ELSEWHERE) <= 4
            assert len(net.decoder.bodies) == 8

    run(test)


def test_decoder_that_dies_is_a_502_and_is_not_asked_twice() -> None:
    """It may have been the request that killed it."""

    async def test() -> None:
        async with network([never], [dying, dying]) as net:
            async with net.chat(request()) as response:
                assert response.status == 502
            assert sum(len(one.bodies) for one in net.decoders) == 1

    run(test)


def test_no_decoder_is_a_503() -> None:
    """With word of when to come again."""

    async def test() -> None:
        async with network([never], []) as net, net.chat(request()) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]

    run(test)


def test_total_time_is_bounded() -> None:
    """A stream that goes on and on is cut; one that has not begun is a 504."""

    async def endless(received: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(received)
        while True:
            await response.write(b'data: {"choices": []}\n\n')
            await asyncio.sleep(0.01)

    async def test() -> None:
        async with network([never], [endless, never], total_timeout=0.3) as net:
            async with net.chat(request(stream=True)) as response:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
            async with net.chat(request()) as response:
                assert response.status == 504
            for fake in net.decoders:
                await fake.cancelled.wait()

    run(test)


def test_server_that_is_out_comes_back() -> None:
    """Its health check takes it out, and is believed when it says that all is well again."""

    async def test() -> None:
        async with network([announcing(ONE)], [answering], probe_interval=0.02) as net:
            url = net.encoder.url
            net.encoder.healthy = False
            await becomes(net, url, "out")
            async with net.chat(request(image("a"))) as response:
                assert response.status == 200
            assert net.encoder.bodies == []
            assert await net.metric('vllm:ec_proxy_encodes_total{outcome="none"}') == 1
            net.encoder.healthy = True
            await becomes(net, url, "serving")
            async with net.chat(request(image("a"))) as response:
                assert response.status == 200
            assert len(net.encoder.bodies) == 1

    run(test)


def test_client_that_goes_away_cancels_all_encoders() -> None:
    """Both of the encoders that work on one request, and no decoder is asked."""

    async def test() -> None:
        async with network([never, never], [answering]) as net:
            pictures = [image(f"picture{number}") for number in range(32)]
            call = asyncio.create_task(net.chat(request(*pictures)).__aenter__())
            for fake in net.encoders:
                await fake.entered.wait()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            for fake in net.encoders:
                await fake.cancelled.wait()
            await net.metric_becomes("vllm:ec_proxy_num_requests_running", 0)
            assert net.decoder.bodies == []
            async with net.client.get(f"{net.url}/instances") as response:
                described = (await response.json())["instances"]
            assert {one["load"] for one in described} == {0}

    run(test)


def test_prefill_failure_is_followed_by_one_try_with_the_media() -> None:
    """An item that did not arrive at the prefill server is handled as at a decoder."""
    kv = {"remote_host": "10.0.0.9"}

    async def prefilled(_request: web.Request) -> web.Response:
        return web.json_response({"choices": [], "kv_transfer_params": kv})

    async def test() -> None:
        prefill = in_turn(failing(500), prefilled)
        async with network([announcing(ONE)], [answering], [prefill]) as net:
            async with net.chat(request(image("a"))) as response:
                assert response.status == 200
            first, second = net.prefills[0].bodies
            assert (has_media(first), has_media(second)) == (False, True)
            assert [body["kv_transfer_params"] for body in net.decoder.bodies] == [kv]

    run(test)


def test_identifier_of_the_fallback_is_not_that_of_the_stand_in() -> None:
    """A decoder that knows an item as a stand-in must not mistake its media for that."""

    async def test() -> None:
        async with network([announcing(ONE)], [in_turn(failing(500), answering)]) as net:
            async with net.chat(request(image("a"))) as response:
                assert response.status == 200
            uuid = identified(request(image("a")))["messages"][0]["content"][0]["uuid"]
            first, second = (body["messages"][0]["content"][0] for body in net.decoder.bodies)
            assert first["uuid"] == uuid
            assert "uuid" not in second

    run(test)
