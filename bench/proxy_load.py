# SPDX-License-Identifier: Apache-2.0
"""What the router adds to streams without media, and what it holds with large images.

    python bench/proxy_load.py [--streams 200] [--tokens-per-second 20] [--seconds 6] [--rounds 5]
        [--json]

A fake server in a process of its own streams events, each with the moment when it was sent
(the monotonic clock is one for all processes of a machine). The same number of clients reads
such streams, first from that server and then through the router, and takes how late each event
is. Added latency: the difference of the medians, in each round and over the rounds. Then so
many requests with an image of 20 MB each wait for an encoder, and the router's memory is read.
Needs the proxy extra, and Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

IMAGE = 20 * 1000 * 1000
IMAGES = 16
PATH = "/v1/chat/completions"


# ── the fake server ──────────────────────────────────────────────────────────


def serve(interval: float, events: int) -> None:
    """Stream to requests with ``stream``; swallow all others and never answer them."""

    async def answer(request: web.Request) -> web.StreamResponse:
        size, first = 0, b""
        async for chunk in request.content.iter_any():
            size += len(chunk)
            first = first or chunk
        if size > 10_000:
            print(size, flush=True)
            await asyncio.Event().wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(events):
            await asyncio.sleep(interval)
            token = {"sent": time.monotonic(), "choices": [{"delta": {"content": " token"}}]}
            await response.write(b"data: " + json.dumps(token).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(_request: web.Request) -> web.Response:
        return web.Response()

    async def run() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post(PATH, answer)
        app.router.add_get("/health", health)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


# ── the clients ──────────────────────────────────────────────────────────────


async def read_streams(url: str, streams: int, seconds: float) -> dict[str, list[float]]:
    """Seconds that events were late, and that streams took to their first one."""
    late: list[float] = []
    first: list[float] = []
    end = time.monotonic() + seconds
    body = {"stream": True, "messages": [{"role": "user", "content": "x" * 200}]}

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(number / streams)  # not all in step
        while time.monotonic() < end:
            asked = time.monotonic()
            async with session.post(url + PATH, json=body) as response:
                assert response.status == 200
                begun = False
                async for line in response.content:
                    if line.startswith(b'data: {"sent"'):
                        now = time.monotonic()
                        late.append(now - json.loads(line[6:])["sent"])
                        if not begun:
                            first.append(now - asked)
                            begun = True

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(client(session, number) for number in range(streams)))
    return {"late": late, "first": first}


async def hold_images(url: str, server: asyncio.subprocess.Process, pid: int) -> dict[str, float]:
    """The router's memory in MB, idle and with images on their way to an encoder."""
    before = resident(pid)

    async def body(number: int) -> AsyncIterator[bytes]:
        yield b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": '
        yield b'{"url": "data:image/png;base64,%d' % number
        for _ in range(0, IMAGE, 1 << 16):
            yield b"A" * (1 << 16)
        yield b'"}}]}]}'

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        calls = [
            asyncio.create_task(session.post(url + PATH, data=body(number)).__aenter__())
            for number in range(IMAGES)
        ]
        assert server.stdout is not None
        peak = before
        for _ in range(IMAGES):
            await server.stdout.readline()
            peak = max(peak, resident(pid))
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
    await asyncio.sleep(0.5)
    after = resident(pid)
    return {"images": IMAGES * IMAGE / 1e6, "idle": before, "with_images": peak, "after": after}


def resident(pid: int) -> float:
    """Megabytes of memory that a process has."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has had."""
    with open(f"/proc/{pid}/stat") as file:
        values = file.read().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


# ── the whole ────────────────────────────────────────────────────────────────


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the two processes, read streams from one and through the other."""
    interval = 1 / options.tokens_per_second
    events = max(1, round(2 * options.tokens_per_second))  # streams of two seconds
    own = [sys.executable, __file__, "--serve", str(interval), str(events)]
    server = await asyncio.create_subprocess_exec(*own, stdout=subprocess.PIPE)
    assert server.stdout is not None
    direct = (await server.stdout.readline()).decode().strip()
    command = [sys.executable, "-m", "ec_connector.proxy", "--port", "0"]
    command += ["--encode", direct, "--decode", direct]
    router = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    try:
        assert router.stderr is not None
        line = (await router.stderr.readline()).decode()
        drained = asyncio.create_task(drain(router.stderr))
        url = line.partition("router on ")[2].partition(",")[0]
        result: dict[str, Any] = {"streams": options.streams, "cores": os.cpu_count()}
        added: dict[str, list[float]] = {"late": [], "first": []}
        for _ in range(options.rounds):
            for name, where in (("direct", direct), ("router", url)):
                spent = cpu_seconds(router.pid)
                seen = await read_streams(where, options.streams, options.seconds)
                result[name] = {
                    "events": len(seen["late"]),
                    **{f"{what}_ms": percentiles(times) for what, times in seen.items()},
                    "router_cores": round((cpu_seconds(router.pid) - spent) / options.seconds, 2),
                }
            for what, found in added.items():
                medians = [result[name][f"{what}_ms"]["p50"] for name in ("router", "direct")]
                found.append(round(medians[0] - medians[1], 3))
        for what, found in added.items():
            result[f"added_{what}_ms"] = found
            result[f"median_added_{what}_ms"] = statistics.median(found)
        result["memory_mb"] = await hold_images(url, server, router.pid)
        drained.cancel()
        return result
    finally:
        for process in (router, server):
            process.kill()
            await process.wait()


async def drain(stream: asyncio.StreamReader) -> None:
    """Read a process's log, so that it never waits for that."""
    while await stream.readline():
        pass


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median and 99th of a hundred, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": round(1e3 * cuts[49], 3), "p99": round(1e3 * cuts[98], 3)}


def main() -> None:
    """Print what was measured."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens-per-second", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=2, metavar=("INTERVAL", "EVENTS"), help="internal")
    options = parser.parse_args()
    if options.serve:
        serve(float(options.serve[0]), int(options.serve[1]))
        return
    result = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name in ("direct", "router"):
        one = result[name]
        print(
            f"{name}: {one['events']} events of {result['streams']} streams, late by "
            f"{one['late_ms']['p50']} ms (p99 {one['late_ms']['p99']}), first after "
            f"{one['first_ms']['p50']} ms, router on {one['router_cores']} cores"
        )
    for what, text in {"late": "an event", "first": "the first event"}.items():
        print(f"added to {text}: {result[f'median_added_{what}_ms']} ms, of the rounds", end=" ")
        print(*result[f"added_{what}_ms"])
    memory = result["memory_mb"]
    print(
        f"memory: {memory['idle']:.0f} MB idle, {memory['with_images']:.0f} MB with "
        f"{memory['images']:.0f} MB of images, {memory['after']:.0f} MB after"
    )


if __name__ == "__main__":
    main()
