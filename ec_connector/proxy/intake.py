# SPDX-License-Identifier: Apache-2.0
"""The router's side towards one client: its request's body, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.types import Receive


class TooLargeError(Exception):
    """A body exceeds the limit; the text says so."""


async def read_body(request: Request, limit: int) -> bytearray:
    """The whole body.

    Raises:
        TooLargeError: it is, or says it is, larger than ``limit`` bytes.
        starlette.requests.ClientDisconnect: the client went away.
    """
    declared = request.headers.get("content-length", "")
    body = bytearray()
    if declared.isdecimal() and int(declared) > limit:
        raise TooLargeError(f"the request exceeds {limit} bytes")
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise TooLargeError(f"the request exceeds {limit} bytes")
    return body


async def until_disconnect(work: Coroutine[Any, Any, object], receive: Receive) -> bool:
    """Run ``work``, or cancel it when the client goes away (False).

    Cancelling closes the connections to servers, which then stop too.
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
