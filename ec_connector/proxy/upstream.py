# SPDX-License-Identifier: Apache-2.0
"""The router's side towards encoders and decoders: one HTTP request each."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Any

import aiohttp
from starlette.types import Send

from ec_connector.proxy.options import Options
from ec_connector.proxy.rewrite import Body, reply_params

logger = logging.getLogger("vllm.ec_connector.proxy")

RawHeaders = Iterable[tuple[bytes, bytes]]

MAX_ENCODE_REPLY = 16 * 1024 * 1024
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Of the request as the client sent it; each hop has its own.
_OF_THE_REQUEST = frozenset({b"host", b"content-length", b"expect"})
_OF_THE_CLIENT = frozenset({b"accept", b"accept-encoding", b"content-type", b"range"})


class EncodeError(Exception):
    """An encoder gave no announcement; ``outcome`` is the counted label."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Upstream:
    """HTTP client for all servers. Make and close it within the event loop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._session = aiohttp.ClientSession(
            # A server may close an idle connection just when it is used again, and a
            # chat request must not be sent twice: so each has a connection of its own.
            # No limit on their number: the engines queue.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),  # clients share this session, not cookies
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
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

    async def encode(self, server: str, headers: RawHeaders, body: Body) -> dict[str, Any]:
        """What the encoder announces for the request's media.

        Raises:
            EncodeError: no answer in time, not a 200, not a chat completion, or one
                that announces nothing.
        """
        options = self._options
        try:
            async with (
                asyncio.timeout(options.encode_timeout),
                self._session.post(
                    f"{server}/v1/chat/completions",
                    data=json.dumps(body).encode(),
                    headers=[
                        *_forwardable(headers, _HOP_BY_HOP | _OF_THE_REQUEST | _OF_THE_CLIENT),
                        ("Content-Type", "application/json"),
                        ("Accept-Encoding", "identity"),
                    ],
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=options.connect_timeout),
                ) as response,
            ):
                raw = await _read(response, MAX_ENCODE_REPLY)
                status = response.status
        except aiohttp.ServerTimeoutError as error:  # only connecting has a limit of its own
            raise EncodeError("unreachable", str(error)) from error
        except TimeoutError as error:
            raise EncodeError("timeout", f"no answer in {options.encode_timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise EncodeError("unreachable", f"{type(error).__name__}: {error}") from error
        if status != 200:
            raise EncodeError("status", f"status {status}: {_excerpt(raw)}")
        try:
            params = reply_params(json.loads(raw))
        except (ValueError, RecursionError) as error:
            raise EncodeError("bad_reply", f"{error}: {_excerpt(raw)}") from error
        if not params:
            raise EncodeError("empty", "it announces nothing")
        return params

    async def relay(
        self, method: str, url: str, headers: RawHeaders, body: bytes | None, send: Send
    ) -> int:
        """Pass a request on, and the answer back byte for byte as it comes.

        Returns the status that the client got: the server's own; 502 when it cannot
        be reached or breaks off before its answer starts, 504 when it is silent for
        too long. When it fails within its answer, the answer is left incomplete, so
        that the client's connection breaks too.
        """
        options = self._options
        status = 0
        try:
            async with self._session.request(
                method,
                url,
                data=body,
                headers=_forwardable(headers, _HOP_BY_HOP | _OF_THE_REQUEST),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=None,
                    sock_connect=options.connect_timeout,
                    sock_read=options.decode_timeout,
                ),
            ) as response:
                status = response.status
                await send(
                    {
                        "type": "http.response.start",
                        "status": status,
                        "headers": _kept(response.raw_headers, _HOP_BY_HOP),
                    }
                )
                while chunk := await response.content.readany():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (aiohttp.ClientError, TimeoutError) as error:
            failure = f"{type(error).__name__}: {error}"
            if status:
                logger.warning("answer of %s broke off: %s", url, failure)
                return status
            status = 504 if isinstance(error, aiohttp.SocketTimeoutError) else 502
            logger.warning("no answer from %s: %s", url, failure)
            await send_error(send, status, f"no answer from the decoding server: {failure}")
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return status


async def send_error(send: Send, status: int, message: str) -> None:
    """Answer with an error body in the form that OpenAI clients read."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    error = {"message": message, "type": kind, "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    parts = bytearray()
    while chunk := await response.content.readany():
        parts += chunk
        if len(parts) > limit:
            raise EncodeError("bad_reply", f"its answer exceeds {limit} bytes")
    return bytes(parts)


def _kept(headers: RawHeaders, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    pairs = [(name.lower(), value) for name, value in headers]
    # A Connection header names further headers that are for one hop only.
    named = {
        token.strip().lower()
        for name, value in pairs
        if name == b"connection"
        for token in value.split(b",")
    }
    return [pair for pair in pairs if pair[0] not in dropped and pair[0] not in named]


def _forwardable(headers: RawHeaders, dropped: frozenset[bytes]) -> list[tuple[str, str]]:
    return [
        (name.decode("latin-1"), value.decode("utf-8", "replace"))
        for name, value in _kept(headers, dropped)
    ]


def _excerpt(raw: bytes) -> str:
    return ascii(raw[:300].decode("utf-8", "replace"))
