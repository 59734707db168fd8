# SPDX-License-Identifier: Apache-2.0
"""The router as an ASGI application.

========================  ==========================================================
``/v1/chat/completions``  media goes to an encoder first; then all goes to a decoder
``/v1/completions``       to a decoder; ``/v1/responses`` and ``/v1/messages`` too
``/v1/models``            a decoder's answer
``/health``               200: the router lives
``/ready``                200 while a decoder is healthy; says which servers are
``/instances``            the servers it knows
``/metrics``              Prometheus text
========================  ==========================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ec_connector.proxy.counters import Counters
from ec_connector.proxy.flow import Flow
from ec_connector.proxy.intake import until_disconnect
from ec_connector.proxy.options import Options
from ec_connector.proxy.replies import error_answer, send_answer
from ec_connector.proxy.upstream import Upstream, UpstreamError

ANSWERED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def build_app(options: Options) -> Starlette:
    """The router for these options; it connects to servers only when asked something."""
    router = Router(options)
    return Starlette(
        routes=[
            # As instances: Starlette then hands over the bare ASGI call.
            *(Route(path, Flow(router), methods=["POST"]) for path in ANSWERED),
            Route("/v1/models", _Models(router), methods=["GET"]),
            Route("/health", router.health),
            Route("/ready", router.ready),
            Route("/instances", router.instances),
            Route("/metrics", router.metrics),
        ],
        lifespan=router.lifespan,
    )


class Router:
    """State shared by all requests: servers in turn, the HTTP client, counters."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.counters = Counters()
        self.encoders = itertools.cycle(options.encode)
        self.decoders = itertools.cycle(options.decode)
        self.upstream: Upstream

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.upstream = Upstream(self.options)
        try:
            yield
        finally:
            await self.upstream.close()

    async def health(self, _request: Request) -> Response:
        return Response()

    async def ready(self, _request: Request) -> Response:
        servers = (*self.options.encode, *self.options.decode)
        answers = await asyncio.gather(*map(self.upstream.healthy, servers))
        healthy = dict(zip(servers, answers, strict=True))
        ready = any(healthy[server] for server in self.options.decode)
        return JSONResponse({"healthy": healthy}, status_code=200 if ready else 503)

    async def instances(self, _request: Request) -> Response:
        roles = {"encode": self.options.encode, "decode": self.options.decode}
        known = [{"url": url, "role": role} for role, urls in roles.items() for url in urls]
        return JSONResponse({"instances": known})

    async def metrics(self, _request: Request) -> Response:
        return Response(self.counters.text(), headers={"content-type": CONTENT_TYPE_LATEST})


class _Models:
    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(self._answer(scope, send), receive)

    async def _answer(self, scope: Scope, send: Send) -> None:
        url = f"{next(self._router.decoders)}/v1/models"
        try:
            await self._router.upstream.relay("GET", url, scope["headers"], None, send)
        except UpstreamError as error:
            answer = error.answer or error_answer(502, f"no answer from a decoding server: {error}")
            await send_answer(send, answer)
