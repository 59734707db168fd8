# SPDX-License-Identifier: Apache-2.0
"""The router's side towards one client: its request's body, and whether it is still there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Send

from ec_connector.proxy.budget import Share

R = TypeVar("R")


class RefusedError(Exception):
    """The router answers by itself, with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Answering:
    """Sends one answer, with the request's id where the server's has none.

    Attributes:
        begun: when the request came.
        status: that the client got; 0 as long as there is none.
        first_byte: seconds until then.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.begun = time.monotonic()
        self.status = 0
        self.first_byte = 0.0

    async def __call__(self, message: Message) -> None:
        if not self.status:
            self.status = message["status"]
            self.first_byte = time.monotonic() - self.begun
            if all(name != b"x-request-id" for name, _ in message["headers"]):
                own = (b"x-request-id", self._request_id.encode("latin-1", "replace"))
                message = {**message, "headers": [*message["headers"], own]}
        await self._send(message)


async def read_body(request: Request, limit: int, share: Share) -> bytearray:
    """The whole body, whose bytes ``share`` holds from the moment that they are announced.

    Raises:
        RefusedError: 413: it is, or says it is, larger than ``limit`` bytes.
        OverloadError: there is no room for it.
        starlette.requests.ClientDisconnect: the client went away.
    """
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    body = bytearray()
    if size <= limit:
        share.resize(size)
        async for chunk in request.stream():
            size = max(size, len(body) + len(chunk))
            if size > limit:
                break
            share.resize(size)
            body += chunk
    if size > limit:
        raise RefusedError(413, f"the request exceeds {limit} bytes")
    return body


async def until_disconnect(work: Coroutine[Any, Any, R], receive: Receive) -> R:
    """What ``work`` returns, or raises.

    Raises:
        starlette.requests.ClientDisconnect: the client went away, and the work was cancelled.
            That closes the connections to servers, which then stop too.
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
    if not finished:
        raise ClientDisconnect
    return await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
