# SPDX-License-Identifier: Apache-2.0
"""The router's side towards its servers: one HTTP request each."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
from starlette.types import Send

from ec_connector.proxy.clean import EventCleaner, clean_json
from ec_connector.proxy.events import FirstEvent
from ec_connector.proxy.headers import RawHeaders, for_answer, for_reading, for_server
from ec_connector.proxy.instances import Instance, Target
from ec_connector.proxy.options import Options
from ec_connector.proxy.payload import Payload
from ec_connector.proxy.replies import Answer, send_answer
from ec_connector.proxy.spans import Spans

logger = logging.getLogger("vllm.ec_connector.proxy")

MAX_REPLY = 16 * 1024 * 1024
"""Bytes of an answer that the router reads itself."""
MAX_ANSWER = 256 * 1024 * 1024
"""Bytes of an answer in JSON that goes to a client."""


class UpstreamError(Exception):
    """No answer that could be used.

    Attributes:
        outcome: how it failed: ``unreachable`` (the server has not got the request),
            ``broke_off``, ``timeout``, ``status``, ``bad_reply``, or ``none``: there is no server.
        status: of the server's answer, or of the error in its stream; 0 without one.
        where: the server.
        sent: the status that the client has got already, with the beginning of the answer.
        answer: the server's own, where it has to be given to the client.
    """

    def __init__(
        self, outcome: str, message: str, status: int = 0, answer: Answer | None = None
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.status = status
        self.answer = answer
        self.where: Instance | None = None
        self.sent = 0


class Upstream:
    """HTTP client for all servers. Make and close it within the event loop."""

    def __init__(self, options: Options, spans: Spans) -> None:
        self._options = options
        self._spans = spans
        self._session = aiohttp.ClientSession(
            # A server may close an idle connection just when it is used again, and a
            # chat request must not be sent twice: so each has a connection of its own.
            # No limit on their number: the engines queue.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),  # clients share this session, not cookies
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self, server: str) -> bool:
        """Whether the server's own health check answers 200 within the connect time-out."""
        timeout = aiohttp.ClientTimeout(total=self._options.connect_timeout)
        try:
            async with self._session.get(f"{server}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def ask(
        self, target: Target, path: str, headers: RawHeaders, body: Payload, limit: float
    ) -> Any:
        """A server's answer in JSON, within ``limit`` seconds. Raises UpstreamError."""
        own = for_reading(headers, target.rank)
        try:
            async with (
                asyncio.timeout(limit),
                self._open(target, "POST", path, own, body, silence=None) as response,
            ):
                raw = await _read(response, MAX_REPLY)
                if (status := response.status) != 200:
                    answer = Answer(status, for_answer(response.raw_headers), raw)
                    raise UpstreamError(
                        "status", f"status {status}: {_excerpt(raw)}", status, answer
                    )
        except TimeoutError as error:
            raise UpstreamError("timeout", f"no answer in {limit:g} s") from error
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise UpstreamError("bad_reply", f"{error}: {_excerpt(raw)}") from error

    async def relay(
        self,
        target: Target,
        path: str,
        headers: RawHeaders,
        body: Payload | None,
        send: Send,
    ) -> int:
        """Pass a request on, and the answer back as it comes, without transfer parameters.

        ``path`` with the query; without a ``body`` it is a GET. Returns the status that the
        client got.

        Raises:
            UpstreamError: there is no answer, or it is an error (4xx, 5xx, or a stream that
                begins with one), and nothing was sent to the client; or the answer broke off,
                ``sent`` says so, and the client's has to break off too.
        """
        sent = 0  # the status

        async def tell(message: Any) -> None:
            nonlocal sent
            sent = sent or message["status"]
            await send(message)

        method = "GET" if body is None else "POST"
        own = for_server(headers, target.rank)
        silence = self._options.decode_timeout
        try:
            async with self._open(target, method, path, own, body, silence) as response:
                await _pass_on(response, tell)
        except UpstreamError as error:
            error.sent = sent
            raise
        return sent

    @asynccontextmanager
    async def _open(
        self,
        target: Target,
        method: str,
        path: str,
        headers: list[tuple[str, str]],
        body: Payload | None,
        silence: float | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A server's answer whose body is yet to be read. Raises UpstreamError, also then."""
        if body is not None:
            headers = [*headers, ("Content-Length", str(body.size))]
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._options.connect_timeout, sock_read=silence
        )
        url = f"{target.instance.url}{path}"
        with self._spans.hop(target, path, headers) as sent, _failures(silence):
            async with self._session.request(
                method,
                url,
                data=body and body.pieces(),
                headers=sent,
                allow_redirects=False,
                timeout=timeout,
            ) as response:
                yield response


@contextmanager
def _failures(silence: float | None) -> Iterator[None]:
    try:
        yield
    except aiohttp.SocketTimeoutError as error:
        raise UpstreamError("timeout", f"silent for {silence:g} s") from error
    except (aiohttp.ServerTimeoutError, aiohttp.ClientConnectorError) as error:
        raise UpstreamError("unreachable", str(error)) from error
    except aiohttp.ClientError as error:
        raise UpstreamError("broke_off", f"{type(error).__name__}: {error}") from error


async def _pass_on(response: aiohttp.ClientResponse, send: Send) -> None:
    kind = response.content_type
    packed = "Content-Encoding" in response.headers  # though identity was asked for
    if response.status >= 400 or (kind.endswith("json") and not packed):
        raw = await _read(response, MAX_ANSWER)
        if not packed:
            with _readable():
                raw = clean_json(raw)
        answer = Answer(response.status, for_answer(response.raw_headers), raw)
        if response.status >= 400:
            raise UpstreamError(
                "status", f"status {response.status}: {_excerpt(raw)}", response.status, answer
            )
        await send_answer(send, answer)
    elif kind == "text/event-stream" and not packed:
        await _pass_events(response, send)
    else:
        await _start(response, send)
        while chunk := await response.content.readany():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _pass_events(response: aiohttp.ClientResponse, send: Send) -> None:
    """The stream, once its first event that says something is no error."""
    cleaner, first = EventCleaner(), FirstEvent()
    while chunk := await response.content.readany():
        with _readable():
            lines = cleaner.feed(chunk)
        if not first.known:
            first.feed(lines)
            if not first.known:
                continue
            lines = first.held
            if first.error:
                raise await _failed_stream(response, cleaner, first)
            await _start(response, send)
        if lines:
            await send({"type": "http.response.body", "body": lines, "more_body": True})
    with _readable():
        last = cleaner.end()
    if not first.known:
        await _start(response, send)
        last = first.held + last
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def _failed_stream(
    response: aiohttp.ClientResponse, cleaner: EventCleaner, first: FirstEvent
) -> UpstreamError:
    rest = await _read(response, MAX_REPLY)
    with _readable():
        raw = first.held + cleaner.feed(rest) + cleaner.end()
    answer = Answer(response.status, for_answer(response.raw_headers), raw)
    return UpstreamError("status", f"a stream with {_excerpt(raw)}", first.error, answer)


async def _start(response: aiohttp.ClientResponse, send: Send) -> None:
    headers = for_answer(response.raw_headers, same_length=True)
    await send({"type": "http.response.start", "status": response.status, "headers": headers})


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UpstreamError("bad_reply", f"transfer parameters in no JSON: {error}") from error


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    parts = bytearray()
    while chunk := await response.content.readany():
        parts += chunk
        if len(parts) > limit:
            raise UpstreamError("bad_reply", f"its answer exceeds {limit} bytes")
    return bytes(parts)


def _excerpt(raw: bytes) -> str:
    return ascii(raw[:300].decode("utf-8", "replace"))
