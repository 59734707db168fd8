# SPDX-License-Identifier: Apache-2.0
"""The router as an ASGI application.

========================  ==========================================================
``/v1/chat/completions``  media goes to an encoder first; then all goes to a decoder
``/v1/models``            a decoder's answer
``/health``               200 while a decoder is healthy; says which servers are
``/metrics``              Prometheus text
========================  ==========================================================

An encoder that fails or is slow costs time, never the answer: the decoder then gets
the request as the client sent it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ec_connector.proxy import rewrite
from ec_connector.proxy.counters import Counters
from ec_connector.proxy.options import Options
from ec_connector.proxy.upstream import EncodeError, Upstream, send_error

logger = logging.getLogger("vllm.ec_connector.proxy")


def build_app(options: Options) -> Starlette:
    """The router for these options; it connects to servers only when asked something."""
    router = Router(options)
    return Starlette(
        routes=[
            # As instances: Starlette then hands over the bare ASGI call.
            Route("/v1/chat/completions", _Chat(router), methods=["POST"]),
            Route("/v1/models", _Models(router), methods=["GET"]),
            Route("/health", router.health),
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
        servers = (*self.options.encode, *self.options.decode)
        answers = await asyncio.gather(*map(self.upstream.healthy, servers))
        healthy = dict(zip(servers, answers, strict=True))
        ready = any(healthy[server] for server in self.options.decode)
        return JSONResponse({"healthy": healthy}, status_code=200 if ready else 503)

    async def metrics(self, _request: Request) -> Response:
        return Response(self.counters.text(), headers={"content-type": CONTENT_TYPE_LATEST})


class _Models:
    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router = self._router
        url = f"{next(router.decoders)}/v1/models"
        await _until_disconnect(
            router.upstream.relay("GET", url, scope["headers"], None, send), receive
        )


class _Chat:
    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counters = self._router.counters
        with counters.in_flight.track_inprogress():
            try:
                raw = await _read_body(Request(scope, receive), self._router.options.max_body)
            except ClientDisconnect:
                counters.disconnects.inc()
                return
            if raw is None:
                limit = self._router.options.max_body
                await send_error(send, 413, f"the request exceeds {limit} bytes")
                counters.requests.labels("refused", "413").inc()
                return
            answer = self._answer(scope, raw, send)
            if not await _until_disconnect(answer, receive):
                counters.disconnects.inc()

    async def _answer(self, scope: Scope, raw: bytes, send: Send) -> None:
        router = self._router
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            await send_error(send, 400, "the request body is not a JSON object")
            router.counters.requests.labels("refused", "400").inc()
            return
        headers, request_id = _with_request_id(scope["headers"])
        media = rewrite.media_parts(body)
        if media:
            raw = json.dumps(await self._encoded(body, len(media), headers, request_id)).encode()
        elif "ec_transfer_params" in body:
            raw = json.dumps(rewrite.decode_body(body, None)).encode()
        url = f"{next(router.decoders)}/v1/chat/completions"
        status = await router.upstream.relay("POST", url, headers, raw, send)
        router.counters.requests.labels("media" if media else "text", str(status)).inc()

    async def _encoded(
        self, body: rewrite.Body, items: int, headers: list[tuple[bytes, bytes]], request_id: str
    ) -> rewrite.Body:
        """The request for the decoder, after an encoder has seen it or failed to."""
        router, counters = self._router, self._router.counters
        counters.items.inc(items)
        server = next(router.encoders)
        started = time.monotonic()
        params: dict[str, Any] = {}
        try:
            params = await router.upstream.encode(server, headers, rewrite.encode_body(body))
        except EncodeError as error:
            counters.encodes.labels(error.outcome).inc()
            logger.warning(
                "encoding failed, the decoder gets the media: request=%s encoder=%s reason=%s: %s",
                request_id, server, error.outcome, error,
            )  # fmt: skip
        else:
            counters.encodes.labels("ok").inc()
        finally:
            counters.encode_seconds.observe(time.monotonic() - started)
        counters.items_announced.inc(rewrite.count_announced(params))
        body = rewrite.decode_body(body, params)
        if router.options.metadata_only and params:
            body, replaced = rewrite.metadata_only(body, params)
            counters.items_replaced.inc(replaced)
        return body


async def _until_disconnect(work: Coroutine[Any, Any, object], receive: Receive) -> bool:
    """Run ``work``, or cancel it when the client goes away (False).

    Cancelling closes the connection to the server, which then stops too.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finished = task.done()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait({task, gone})
    if finished:
        await task
    return finished


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request, limit: int) -> bytes | None:
    """The whole body; None when it is, or says it is, larger than ``limit`` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        return None
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)


def _with_request_id(
    headers: list[tuple[bytes, bytes]],
) -> tuple[list[tuple[bytes, bytes]], str]:
    """The headers with an ``X-Request-Id``, so that one name is in every server's log."""
    for name, value in headers:
        if name == b"x-request-id" and value:
            return headers, ascii(value[:128].decode("latin-1"))
    request_id = uuid.uuid4().hex
    return [*headers, (b"x-request-id", request_id.encode())], request_id
