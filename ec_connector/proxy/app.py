# SPDX-License-Identifier: Apache-2.0
"""The router as an ASGI application.

========================  ==========================================================
``/v1/chat/completions``  media goes to an encoder first; then all goes to a decoder
``/v1/responses``         the same, but the media stays with the request
``/v1/messages``          the same
``/v1/completions``       to a decoder
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
from collections.abc import AsyncIterator

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ec_connector.proxy.budget import Budget
from ec_connector.proxy.counters import Counters
from ec_connector.proxy.decoding import Call, Decoders
from ec_connector.proxy.encoding import Encoders
from ec_connector.proxy.flow import Flow
from ec_connector.proxy.headers import with_request_id
from ec_connector.proxy.instances import Instances, Role
from ec_connector.proxy.intake import Answering, until_disconnect
from ec_connector.proxy.options import Options
from ec_connector.proxy.probes import probe
from ec_connector.proxy.upstream import Upstream

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
            Route("/instances", router.described),
            Route("/metrics", router.metrics),
        ],
        lifespan=router.lifespan,
    )


class Router:
    """What all requests share."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.budget = Budget(options.max_requests, options.max_bytes)
        self.instances = Instances()
        self.counters = Counters(self.instances, self.budget)
        for role in Role:
            for url, ranks in getattr(options, role):
                self.instances.add(role, url, ranks)
        self.upstream: Upstream
        self.encoders: Encoders
        self.decoders: Decoders

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        options, instances, counters = self.options, self.instances, self.counters
        self.upstream = Upstream(options)
        self.encoders = Encoders(instances, self.upstream, counters, options.encode_timeout)
        self.decoders = Decoders(instances, self.upstream, counters, options)
        probing = asyncio.create_task(probe(instances, self.upstream, options.probe_interval))
        try:
            yield
        finally:
            probing.cancel()
            await asyncio.wait({probing})
            await self.upstream.close()

    async def health(self, _request: Request) -> Response:
        return Response()

    async def ready(self, _request: Request) -> Response:
        known = self.instances.all()
        answers = await asyncio.gather(*(self.upstream.healthy(one.url) for one in known))
        roles = {one.role for one, healthy in zip(known, answers, strict=True) if healthy}
        ready = Role.DECODE in roles and (
            Role.PREFILL in roles or not self.instances.of(Role.PREFILL)
        )
        healthy = {one.url: answer for one, answer in zip(known, answers, strict=True)}
        return JSONResponse({"healthy": healthy}, status_code=200 if ready else 503)

    async def described(self, _request: Request) -> Response:
        return JSONResponse({"instances": self.instances.described()})

    async def metrics(self, _request: Request) -> Response:
        return Response(self.counters.text(), headers={"content-type": CONTENT_TYPE_LATEST})


class _Models:
    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, request_id = with_request_id(scope["headers"])
        call = Call("/v1/models", headers, request_id, Answering(send, request_id))
        with contextlib.suppress(ClientDisconnect):
            await until_disconnect(self._router.decoders.fetch(call), receive)
