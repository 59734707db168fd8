# SPDX-License-Identifier: Apache-2.0
"""What becomes of one request: its media to encoders, then all to a decoder."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from ec_connector.proxy import media, rewrite
from ec_connector.proxy.decoding import Call, Version
from ec_connector.proxy.encoding import Job
from ec_connector.proxy.headers import with_request_id
from ec_connector.proxy.intake import TooLargeError, read_body, until_disconnect
from ec_connector.proxy.payload import parse
from ec_connector.proxy.replies import error_answer, send_answer
from ec_connector.proxy.rewrite import Body

if TYPE_CHECKING:
    from ec_connector.proxy.app import Router

logger = logging.getLogger("vllm.ec_connector.proxy")


class Flow:
    """Answers requests to one of the routes that models answer."""

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
                await self._refuse(send, 413, str(error))
            else:
                if not await until_disconnect(self._in_time(scope, raw, send), receive):
                    counters.disconnects.inc()

    async def _refuse(self, send: Send, status: int, message: str) -> None:
        await send_answer(send, error_answer(status, message))
        self._router.counters.requests.labels("refused", str(status)).inc()

    async def _in_time(self, scope: Scope, raw: bytearray, send: Send) -> None:
        begun = False

        async def tell(message: object) -> None:
            nonlocal begun
            begun = True
            await send(message)  # type: ignore[arg-type]  # as it came

        limit = self._router.options.total_timeout
        try:
            async with asyncio.timeout(limit):
                await self._answer(scope, raw, tell)
        except TimeoutError:
            if not begun:
                await self._refuse(send, 504, f"no answer within {limit:g} s")
            logger.warning("a request took more than %g s", limit)

    async def _answer(self, scope: Scope, raw: bytearray, send: Send) -> None:
        try:
            body = parse(raw)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            await self._refuse(send, 400, "the request body is not a JSON object")
            return
        path, query = scope["path"], scope["query_string"].decode("latin-1")
        headers, request_id = with_request_id(scope["headers"])
        call = Call(f"{path}{'?' if query else ''}{query}", headers, request_id, send)
        kind = "text"
        if rewrite.PARAMS in body:
            body = rewrite.decode_body(body, None)
            versions = [Version(body)]
        else:
            versions = [Version(body, raw)]
        if found := media.items(path, body):
            kind = "media"
            versions = await self._encoded(path, body, found, call)
        status = await self._router.decoders.answer(call, versions)
        self._router.counters.requests.labels(kind, str(status)).inc()

    async def _encoded(
        self, path: str, body: Body, found: list[media.Item], call: Call
    ) -> list[Version]:
        """The request with what encoders announced, if they did, and as it is without."""
        counters = self._router.counters
        counters.items.inc(len(found))
        chat = path == media.CHAT
        named, plain = body, Version(body)
        if chat:
            named = media.identified(body)
            plain = Version(media.anonymous(body))
            found = media.items(path, named)
        options = named if chat else rewrite.encode_options(body)
        encoded = await self._router.encoders.run(
            Job(found, options, call.headers, call.request_id)
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
        return [Version(sent, encoded=True, replaced=bool(parts)), plain]
