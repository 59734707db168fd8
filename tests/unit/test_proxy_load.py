# SPDX-License-Identifier: Apache-2.0
"""How much the router takes on, and what it tells of it, on real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="the proxy extra is not installed")
pytest.importorskip("uvicorn", reason="the proxy extra is not installed")
pytest.importorskip("starlette", reason="the proxy extra is not installed")
pytest.importorskip("prometheus_client", reason="the proxy extra is not installed")

from aiohttp import web  # noqa: E402

from ec_connector.proxy.budget import Budget, OverloadError  # noqa: E402
from ec_connector.proxy.options import parse_options  # noqa: E402
from tests.router.net import (  # noqa: E402
    announcing,
    answering,
    entry,
    image,
    network,
    never,
    request,
    run,
)  # fmt: skip

RUNNING = "vllm:ec_proxy_num_requests_running"
HELD = "vllm:ec_proxy_body_bytes"


def test_budget_is_given_back_whatever_happens() -> None:
    """Also by a request that is refused half-way."""
    budget = Budget(2, 100)
    with budget.request() as first:
        first.resize(60)
        with budget.request() as second:
            second.resize(40)
            with pytest.raises(OverloadError, match="41 more"):
                second.resize(81)
            with pytest.raises(OverloadError, match="2 requests"), budget.request():
                pass
            first.resize(20)
            second.resize(80)
            assert (budget.requests, budget.bytes) == (2, 100)
    assert (budget.requests, budget.bytes) == (0, 0)


def test_too_many_requests_are_told_to_come_again() -> None:
    """503 with Retry-After; as soon as one is done, the next is taken."""
    go_on = asyncio.Event()

    async def waiting(received: web.Request) -> web.Response:
        await go_on.wait()
        return await answering(received)

    async def test() -> None:
        async with network([never], [waiting], max_requests=2) as net:
            calls = [asyncio.create_task(net.chat(request()).__aenter__()) for _ in range(2)]
            await net.metric_becomes(RUNNING, 2)
            async with net.chat(request()) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
                assert "2 requests" in (await response.json())["error"]["message"]
            go_on.set()
            for call in calls:
                assert (await call).status == 200
                await (await call).read()
            async with net.chat(request()) as response:
                assert response.status == 200
            refused = 'vllm:ec_proxy_requests_total{kind="refused",status="503"}'
            assert await net.metric(refused) == 1

    run(test)


def test_bodies_that_do_not_fit_are_told_to_come_again() -> None:
    """Before they are read, whether their size is declared or not."""

    async def pieces() -> Any:
        for _ in range(8):
            yield b" " * 1024

    async def test() -> None:
        options = {"max_body": 10_000, "max_bytes": 10_000}
        async with network([never], [never], **options) as net:
            body = request(padding="x" * 6000)
            call = asyncio.create_task(net.chat(body).__aenter__())
            await net.decoder.entered.wait()
            assert await net.metric(HELD) == len(json.dumps(body))
            for data in (b" " * 6000, pieces()):
                url = f"{net.url}/v1/chat/completions"
                async with net.client.post(url, data=data) as response:
                    assert response.status == 503
            call.cancel()
            await asyncio.wait([call])
            await net.metric_becomes(HELD, 0)

    run(test)


def test_body_that_does_not_arrive_is_given_up() -> None:
    """A client that declares much and sends nothing holds room for a bounded time."""

    async def stuck() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    async def test() -> None:
        async with network([never], [never], body_timeout=0.1) as net:
            url, headers = f"{net.url}/v1/chat/completions", {"Content-Length": "5000"}
            async with net.client.post(url, data=stuck(), headers=headers) as response:
                assert response.status == 408
            assert await net.metric(HELD) == 0

    run(test)


def test_one_id_and_one_trace_on_every_hop() -> None:
    """The client's own, or one that the client is told."""

    async def test() -> None:
        async with network([announcing({"h": entry(0)})], [answering]) as net:
            trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            headers = {"X-Request-Id": "mine", "traceparent": trace, "tracestate": "a=b"}
            async with net.chat(request(image("a")), headers=headers) as response:
                assert response.headers.getall("X-Request-Id") == ["mine"]
            for fake in (net.encoder, net.decoder):
                assert {name: fake.headers[0][name] for name in headers} == headers
            async with net.chat(request(image("a"))) as response:
                given = response.headers["X-Request-Id"]
            for fake in (net.encoder, net.decoder):
                assert fake.headers[1]["X-Request-Id"] == given
            async with net.client.post(f"{net.url}/v1/completions", data=b"[") as response:
                assert (response.status, len(response.headers["X-Request-Id"])) == (400, 32)

    run(test)


def test_servers_are_in_the_metrics() -> None:
    """By role and address, with what they have now."""

    async def test() -> None:
        async with network([never], [answering]) as net:
            call = asyncio.create_task(net.chat(request(image("a"))).__aenter__())
            await net.encoder.entered.wait()
            labels = f'{{role="encode",server="{net.encoder.url}"}}'
            assert await net.metric(f"vllm:ec_proxy_server_load{labels}") == 1
            assert await net.metric(f"vllm:ec_proxy_server_up{labels}") == 1
            call.cancel()
            await asyncio.wait([call])
            await net.metric_becomes(f"vllm:ec_proxy_server_load{labels}", 0)

    run(test)


def test_limits_that_contradict_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A request of the largest size must fit."""
    servers = ["--encode", "http://a", "--decode", "http://b"]
    with pytest.raises(SystemExit) as ended:
        parse_options([*servers, "--max-body", "2GiB", "--max-bytes", "1GiB"])
    assert ended.value.code == 2
    assert "no request of that size" in capsys.readouterr().err
    assert parse_options([*servers, "--max-requests", "7"]).max_requests == 7


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_image_is_held_once() -> None:
    """A router process with eight images of 16 MB under way grows by little more than them."""
    size, count = 16 * 1024 * 1024, 8
    body = b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": '
    body += b'"data:image/png;base64,' + b"A" * size + b'"}}]}]}'

    async def test() -> None:
        swallowed = asyncio.Event()
        seen = 0

        async def swallow(received: web.Request) -> web.StreamResponse:
            nonlocal seen
            async for chunk in received.content.iter_any():
                seen += len(chunk)
                if seen >= count * size:
                    swallowed.set()
            return await never(received)

        async with network([swallow], []) as net:
            net.encoder.reads = False
            command = [sys.executable, "-m", "ec_connector.proxy", "--port", "0"]
            command += ["--encode", net.encoder.url, "--decode", net.encoder.url]
            process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
            try:
                assert process.stderr is not None
                line = (await process.stderr.readline()).decode()
                url = line.partition("router on ")[2].partition(",")[0]
                before = resident(process.pid)
                url += "/v1/chat/completions"
                calls = [
                    asyncio.create_task(net.client.post(url, data=data_of(body)).__aenter__())
                    for _ in range(count)
                ]
                await swallowed.wait()
                grown = resident(process.pid) - before
                print(f"{grown / (count * size):.2f} times the images")
                assert count * size <= grown < 1.5 * count * size
                for call in calls:
                    call.cancel()
                await asyncio.wait(calls)
            finally:
                process.kill()
                await process.wait()

    run(test)


async def data_of(body: bytes) -> Any:
    for start in range(0, len(body), 1 << 18):
        yield body[start : start + (1 << 18)]


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
