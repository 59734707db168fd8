# SPDX-License-Identifier: Apache-2.0
"""What becomes of one request: its media to encoders, then all to a decoder."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from ec_connector.proxy import media, rewrite
from ec_connector.proxy.budget import OverloadError, Share
from ec_connector.proxy.decoding import Call, Version
from ec_connector.proxy.encoding import Job
from ec_connector.proxy.headers import with_request_id
from ec_connector.proxy.intake import (
    Answering,
    RefusedError,
    read_body,
    until_disconnect,
)
from ec_connector.proxy.payload import parse
from ec_connector.proxy.replies import error_answer, send_answer
from ec_connector.proxy.rewrite import Body
from ec_connector.proxy.tenants import apart, tenant_of

if TYPE_CHECKING:
    from ec_connector.proxy.app import Router

logger = logging.getLogger("vllm.ec_connector.proxy")


IN_THREAD = 256 * 1024
"""Characters of media from which on they are digested beside the event loop."""


class Flow:
    """Answers requests to one of the routes that models answer."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, request_id = with_request_id(scope["headers"])
        query = scope["query_string"].decode("latin-1")
        answer = Answering(send, request_id)
        call = Call(f"{scope['path']}{'?' if query else ''}{query}", headers, request_id, answer)
        with self._router.spans.request(call.route, headers, answer):
            await self._serve(call, Request(scope, receive), receive)

    async def _serve(self, call: Call, request: Request, receive: Receive) -> None:
        answer, request_id = call.send, call.request_id
        counters, kind = self._router.counters, "refused"
        try:
            with self._router.budget.request() as share:
                raw = await self._received(request, share)
                kind = await until_disconnect(self._in_time(call, raw), receive)
        except ClientDisconnect:
            counters.disconnects.inc()
            logger.info("the client went away: request=%s", request_id)
            return
        except OverloadError as error:
            refusal = error_answer(503, f"overloaded: {error}", [(b"retry-after", b"1")])
            await send_answer(answer, refusal)
        except RefusedError as error:
            await send_answer(answer, error_answer(error.status, str(error)))
        taken = time.monotonic() - answer.begun
        counters.requests.labels(kind, str(answer.status)).inc()
        counters.first_byte_seconds.observe(answer.first_byte)
        counters.request_seconds.observe(taken)
        logger.info(
            "answered: request=%s path=%s kind=%s status=%d seconds=%.3f",
            request_id, call.route, kind, answer.status, taken,
        )  # fmt: skip

    async def _received(self, request: Request, share: Share) -> bytearray:
        options = self._router.options
        try:
            async with asyncio.timeout(options.body_timeout):
                return await read_body(request, options.max_body, share)
        except TimeoutError as error:
            limit = options.body_timeout
            raise RefusedError(408, f"the request did not arrive within {limit:g} s") from error

    async def _in_time(self, call: Call, raw: bytearray) -> str:
        limit = self._router.options.total_timeout
        try:
            async with asyncio.timeout(limit):
                return await self._answer(call, raw)
        except TimeoutError as error:
            logger.warning("more than %g s: request=%s", limit, call.request_id)
            if call.send.status:  # half an answer: the server closes what has no end
                return "cut"
            raise RefusedError(504, f"no answer within {limit:g} s") from error

    async def _answer(self, call: Call, raw: bytearray) -> str:
        """Answer a request. Returns of what kind it is."""
        try:
            body = parse(raw)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise RefusedError(400, "the request body is not a JSON object")
        sent, tenant = body, ""
        body = rewrite.decode_body(body, None)
        if header := self._router.options.tenant_header:
            tenant = tenant_of(call.headers, header)
            body = apart(body, tenant)
        own = body != sent
        del sent
        found = media.items(call.route, body)
        if not found and not own:
            del body  # its bytes are enough
            await self._router.decoders.answer(call, [Version(raw)])
            return "text"
        raw.clear()  # the object holds it all
        if not found:
            await self._router.decoders.answer(call, [Version(body)])
            return "text"
        await self._router.decoders.answer(call, await self._encoded(body, found, call, tenant))
        return "media"

    async def _encoded(
        self, body: Body, found: list[media.Item], call: Call, tenant: str
    ) -> list[Version]:
        """The request with what encoders announced, if they did, and as it is without."""
        counters = self._router.counters
        counters.items.inc(len(found))
        chat = call.route == media.CHAT
        named, plain = body, Version(body)
        if chat:
            many = media.size(found) > IN_THREAD
            named = (
                await asyncio.to_thread(media.identified, body, tenant)
                if many
                else media.identified(body, tenant)
            )
            plain = Version(media.anonymous(body))
            found = media.items(media.CHAT, named)
        options = named if chat else rewrite.encode_options(body)
        with self._router.ahead.request() as hints:
            encoded = await self._router.encoders.run(
                Job(found, options, call.headers, call.request_id, hints.announced)
            )
        if not encoded.params:
            return [plain]
        counters.items_announced.inc(rewrite.count_announced(encoded.params))
        sent = rewrite.decode_body(named, encoded.params)
        parts = {}
        if chat and self._router.options.metadata_only:
            # Counted over all parts, also those that no encoder could be asked for.
            places = [(m, p) for m, p, _ in rewrite.media_parts(named)]
            placed = {
                places.index(found[place].place): entry for place, entry in encoded.placed.items()
            }
            parts = rewrite.replaced(named, placed)
            counters.items_replaced.inc(len(parts))
            sent = rewrite.with_parts(sent, parts)
        return [Version(sent, encoded=True, replaced=bool(parts), told=hints.target), plain]
