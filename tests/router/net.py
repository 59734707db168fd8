# SPDX-License-Identifier: Apache-2.0
"""The router between fake servers and a client, all on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from ec_connector.proxy.options import Address, Options
from ec_connector.proxy.serve import listen, server

PATIENCE = 10.0
"""Seconds until a condition that never comes true fails its test."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeServer:
    """A fake OpenAI server: keeps the requests it gets and answers with ``answer``."""

    def __init__(self, answer: Handler) -> None:
        self.answer = answer
        self.bodies: list[Any] = []
        self.headers: list[Any] = []
        self.peers: list[Any] = []
        self.targets: list[str] = []
        self.healthy = True
        self.reads = True  # else `answer` has to
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        for path in ("chat/completions", "completions", "responses", "messages"):
            app.router.add_post(f"/v1/{path}", self._handle)
        app.router.add_get("/v1/models", self._handle)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await web.SockSite(self._runner, listener).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.reads:
            raw = await request.read()
            self.bodies.append(json.loads(raw) if raw else None)
        self.headers.append(request.headers)
        self.targets.append(request.path_qs)
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        self.entered.set()
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def never(_request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def announcing(params: object) -> Handler:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response({"choices": [], "ec_transfer_params": params})

    return answer


async def answering(_request: web.Request) -> web.Response:
    return web.json_response({"choices": [{"message": {"content": "a cat"}}]})


class Net:
    """Fake encoders and decoders, the router before them, and a client."""

    def __init__(
        self,
        encoders: list[FakeServer],
        decoders: list[FakeServer],
        prefills: list[FakeServer],
    ) -> None:
        self.encoders = encoders
        self.decoders = decoders
        self.prefills = prefills
        self.url = ""
        self.client: aiohttp.ClientSession

    @property
    def encoder(self) -> FakeServer:
        return self.encoders[0]

    @property
    def decoder(self) -> FakeServer:
        return self.decoders[0]

    def chat(self, body: object, **options: Any) -> Any:
        return self.client.post(f"{self.url}/v1/chat/completions", json=body, **options)

    async def metric(self, line: str) -> float:
        async with self.client.get(f"{self.url}/metrics") as response:
            for row in (await response.text()).splitlines():
                name, _, value = row.rpartition(" ")
                if name == line:
                    return float(value)
        raise AssertionError(f"no metric {line}")

    async def metric_becomes(self, line: str, value: float) -> None:
        async with asyncio.timeout(PATIENCE):
            while await self.metric(line) != value:
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def network(
    encoders: Sequence[Handler],
    decoders: Sequence[Handler],
    prefills: Sequence[Handler] = (),
    *,
    name: str = "127.0.0.1",
    **options: Any,
) -> AsyncIterator[Net]:
    net = Net(
        [FakeServer(answer) for answer in encoders],
        [FakeServer(answer) for answer in decoders],
        [FakeServer(answer) for answer in prefills],
    )
    fakes = (*net.encoders, *net.decoders, *net.prefills)
    for fake in fakes:
        await fake.start()
    chosen = Options(
        **{
            "encode": tuple(Address(fake.url) for fake in net.encoders),
            "decode": tuple(Address(fake.url.replace("127.0.0.1", name)) for fake in net.decoders),
            "prefill": tuple(Address(fake.url) for fake in net.prefills),
            **options,
        }
    )
    listener = listen("127.0.0.1", 0)
    router = server(chosen)
    # uvicorn's own `serve` looks for the end ten times a second, which adds up over tests.
    router.config.load()
    router.lifespan = router.config.lifespan_class(router.config)
    await router.startup(sockets=[listener])
    net.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as net.client:
            yield net
    finally:
        for listening in router.servers:
            listening.close()
        await router.lifespan.shutdown()
        await asyncio.gather(*(fake.stop() for fake in fakes))


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(3 * PATIENCE):
            await test()

    asyncio.run(bounded())


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


def entry(*indices: int, **changes: Any) -> dict[str, Any]:
    return {
        "item_indices": list(indices),
        "metadata": {"image_grid_thw": [1, 4, 4]},
        "modality": "image",
        "peer_host": "127.0.0.1",
        "peer_port": 14579,
        "size_bytes": 64,
        "shape": [4, 8],
        **changes,
    }


def request(*content: Any, **options: Any) -> dict[str, Any]:
    parts = [*content, {"type": "text", "text": "what is it?"}]
    return {"model": "m", "messages": [{"role": "user", "content": parts}], **options}


def closed_port() -> str:
    with listen("127.0.0.1", 0) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
