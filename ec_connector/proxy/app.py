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
``/instances``            the servers it knows; POST and DELETE: one comes, one leaves
``/instances/ahead``      what a decoder's agent may fetch ahead, as long as it listens
``/metrics``              Prometheus text
========================  ==========================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ec_connector.proxy.ahead import Ahead, Listening, Streams
from ec_connector.proxy.budget import Budget, OverloadError
from ec_connector.proxy.counters import Counters
from ec_connector.proxy.decoding import Call, Decoders
from ec_connector.proxy.encoding import Encoders
from ec_connector.proxy.flow import Flow
from ec_connector.proxy.headers import with_request_id
from ec_connector.proxy.instances import Instances, Role
from ec_connector.proxy.intake import Answering, RefusedError, read_body, until_disconnect
from ec_connector.proxy.options import Options
from ec_connector.proxy.probes import check, probe
from ec_connector.proxy.registrar import MAX_BYTES, Registrar
from ec_connector.proxy.spans import spans_to
from ec_connector.proxy.upstream import Upstream
from ec_connector.token_file import load_token

ANSWERED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def build_app(options: Options) -> Starlette:
    """The router for these options; it connects to servers only when asked something."""
    router = Router(options)
    app = Starlette(
        routes=[
            # As instances: Starlette then hands over the bare ASGI call.
            *(Route(path, Flow(router), methods=["POST"]) for path in ANSWERED),
            Route("/v1/models", _Models(router), methods=["GET"]),
            Route("/health", router.health),
            Route("/ready", router.ready),
            Route("/instances", router.described),
            Route("/instances", router.register, methods=["POST", "DELETE"]),
            Route("/instances/ahead", router.listening, methods=["POST"]),
            Route("/metrics", router.metrics),
        ],
        lifespan=router.lifespan,
    )
    app.state.streams = router.streams
    return app


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
        token = options.register_token
        self.registrar = Registrar(
            self.instances, load_token("--register-token", token) if token else ""
        )
        self.streams = Streams(self.registrar.knows)
        self.listening = Listening(self.registrar, self.streams, self.budget)
        self.ahead = Ahead(self.streams, self.instances, self.counters)
        self.spans = spans_to(options.otlp_traces_endpoint)
        self.upstream: Upstream
        self.encoders: Encoders
        self.decoders: Decoders

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        options, instances, counters = self.options, self.instances, self.counters
        self.upstream = Upstream(options, self.spans)
        self.encoders = Encoders(instances, self.upstream, counters, options.encode_timeout)
        self.decoders = Decoders(instances, self.upstream, counters, options)
        tasks = {
            asyncio.create_task(probe(instances, self.upstream, options.probe_interval)),
            asyncio.create_task(self._expire()),
        }
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self.upstream.close()
            await asyncio.to_thread(self.spans.close)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.registrar.expire(time.monotonic())

    async def health(self, _request: Request) -> Response:
        return Response()

    async def ready(self, _request: Request) -> Response:
        found = await check(self.instances.all(), self.upstream)
        roles = {one.role for one, healthy in found.items() if healthy}
        ready = Role.DECODE in roles and (
            Role.PREFILL in roles or not self.instances.of(Role.PREFILL)
        )
        healthy = {one.url: answer for one, answer in found.items()}
        return JSONResponse({"healthy": healthy}, status_code=200 if ready else 503)

    async def described(self, _request: Request) -> Response:
        return JSONResponse({"instances": self.instances.described()})

    async def register(self, request: Request) -> Response:
        try:
            with self.budget.request() as share:
                raw = bytes(await read_body(request, MAX_BYTES, share))
            words = self.registrar.read(request.headers.get("authorization", ""), raw)
            if request.method == "DELETE":
                self.registrar.leave(words)
                return JSONResponse({})
            healthy = await self.upstream.healthy(words.url)
            ttl = self.registrar.renew(words, healthy=healthy, now=time.monotonic())
        except OverloadError as error:
            return PlainTextResponse(str(error), 503)
        except RefusedError as error:
            return PlainTextResponse(str(error), error.status)
        return JSONResponse({"ttl": ttl, "healthy": healthy})

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
