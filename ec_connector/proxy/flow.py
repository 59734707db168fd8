# SPDX-License-Identifier: Apache-2.0
"""What becomes of one request: its media to an encoder, then all to a decoder.

An encoder that fails or is slow costs time, never the answer: the decoder then gets
the request as the client sent it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from ec_connector.proxy import rewrite
from ec_connector.proxy.headers import RawHeaders, with_request_id
from ec_connector.proxy.intake import TooLargeError, read_body, until_disconnect
from ec_connector.proxy.payload import Payload, parse
from ec_connector.proxy.replies import error_answer, send_answer
from ec_connector.proxy.upstream import UpstreamError

if TYPE_CHECKING:
    from ec_connector.proxy.app import Router

logger = logging.getLogger("vllm.ec_connector.proxy")


class Flow:
    """One route's requests."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counters = self._router.counters
        with counters.in_flight.track_inprogress():
            try:
                raw = await read_body(Request(scope, receive), self._router.options.max_body)
            except ClientDisconnect:
                counters.disconnects.inc()
            except TooLargeError as error:
                await send_answer(send, error_answer(413, str(error)))
                counters.requests.labels("refused", "413").inc()
            else:
                if not await until_disconnect(self._answer(scope, raw, send), receive):
                    counters.disconnects.inc()

    async def _answer(self, scope: Scope, raw: bytearray, send: Send) -> None:
        router = self._router
        try:
            body = parse(raw)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            await send_answer(send, error_answer(400, "the request body is not a JSON object"))
            router.counters.requests.labels("refused", "400").inc()
            return
        headers, request_id = with_request_id(scope["headers"])
        path = scope["path"]
        media = rewrite.media_parts(body) if path == "/v1/chat/completions" else []
        payload = Payload([raw])
        if media:
            payload = Payload.of(await self._encoded(body, len(media), headers, request_id))
        elif rewrite.PARAMS in body:
            payload = Payload.of(rewrite.decode_body(body, None))
        query = scope["query_string"].decode("latin-1")
        url = f"{next(router.decoders)}{path}{'?' if query else ''}{query}"
        try:
            status = await router.upstream.relay("POST", url, headers, payload, send)
        except UpstreamError as error:
            logger.warning("no answer: request=%s server=%s: %s", request_id, url, error)
            answer = error.answer or error_answer(
                504 if error.outcome == "timeout" else 502,
                f"no answer from the decoding server: {error}",
            )
            status = await send_answer(send, answer)
        router.counters.requests.labels("media" if media else "text", str(status)).inc()

    async def _encoded(
        self, body: rewrite.Body, items: int, headers: RawHeaders, request_id: str
    ) -> rewrite.Body:
        """The request for the decoder, after an encoder has seen it or failed to."""
        router, counters = self._router, self._router.counters
        counters.items.inc(items)
        server = next(router.encoders)
        started = time.monotonic()
        params: dict[str, Any] = {}
        outcome = "ok"
        try:
            reply = await router.upstream.ask(
                f"{server}/v1/chat/completions",
                headers,
                Payload.of(rewrite.encode_body(body)),
                router.options.encode_timeout,
            )
            try:
                params = rewrite.reply_params(reply)
            except ValueError as error:
                raise UpstreamError("bad_reply", str(error)) from error
            if not params:
                raise UpstreamError("empty", "it announces nothing")
        except UpstreamError as error:
            outcome = error.outcome
            logger.warning(
                "encoding failed, the decoder gets the media: request=%s encoder=%s reason=%s: %s",
                request_id, server, outcome, error,
            )  # fmt: skip
        counters.encodes.labels(outcome).inc()
        counters.encode_seconds.observe(time.monotonic() - started)
        counters.items_announced.inc(rewrite.count_announced(params))
        body = rewrite.decode_body(body, params)
        if router.options.metadata_only and params:
            body, replaced = rewrite.metadata_only(body, params)
            counters.items_replaced.inc(replaced)
        return body
