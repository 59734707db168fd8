# SPDX-License-Identifier: Apache-2.0
"""Telling a decoder's agent what it will be asked for, as soon as an encoder has announced it.

An agent that registered keeps a request open, ``POST /instances/ahead``, whose answer is a line for
each item (:mod:`ec_connector.protocol.hint`) and an empty one every few seconds. A hint is only a
hint: nothing waits for it, and one that does not fit into an agent's queue is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from ec_connector.protocol.hint import hint_lines
from ec_connector.proxy.budget import Budget, OverloadError
from ec_connector.proxy.counters import Counters
from ec_connector.proxy.instances import Instances, Role, Target
from ec_connector.proxy.intake import RefusedError, read_body, until_disconnect
from ec_connector.proxy.placement import least_loaded
from ec_connector.proxy.registrar import MAX_BYTES, Registrar, Words

logger = logging.getLogger("vllm.ec_connector.proxy")

KEEP_ALIVE: Final = 5.0
"""Seconds of silence after which an empty line is sent."""
QUEUE: Final = 256
"""Lines that may wait for one agent."""
MAX_STREAMS: Final = 1024


class Stream:
    """What one agent is yet to be told."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.ended = False
        self._lines: asyncio.Queue[bytes] = asyncio.Queue(QUEUE)

    def offer(self, line: bytes) -> bool:
        """Whether there was room for it."""
        with contextlib.suppress(asyncio.QueueFull):
            self._lines.put_nowait(line)
            return True
        return False

    def end(self) -> None:
        """Let :meth:`next` return, and its caller see that it is over."""
        self.ended = True
        self.offer(b"")

    async def next(self, patience: float) -> bytes:
        """All lines there are; empty when there is none for ``patience`` seconds."""
        try:
            async with asyncio.timeout(patience):
                lines = [await self._lines.get()]
        except TimeoutError:
            return b""
        while not self._lines.empty():
            lines.append(self._lines.get_nowait())
        return b"".join(lines)


class Streams:
    """The agents that listen now.

    Args:
        knows: whether an engine is registered.
    """

    def __init__(self, knows: Callable[[Words], bool]) -> None:
        self._knows = knows
        self._of: dict[str, dict[str, Stream]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def open(self, words: Words) -> Stream:
        """An agent listens from now on, in place of an earlier connection of its own.

        Raises:
            RefusedError: it has not registered, decodes nothing, or there are too many.
        """
        if "decode" not in words.serves:
            raise RefusedError(400, "hints are for who decodes")
        if not self._knows(words):
            raise RefusedError(409, "it is not registered, or not yet")
        before = self._of.get(words.url, {}).get(words.id)
        if before is not None:
            before.end()
        elif len(self) >= MAX_STREAMS:
            raise RefusedError(503, f"{MAX_STREAMS} agents listen already")
        stream = Stream(words)
        self._of.setdefault(words.url, {})[words.id] = stream
        return stream

    def close(self, stream: Stream) -> None:
        """It listens no more."""
        words = stream.words
        streams = self._of.get(words.url, {})
        if streams.get(words.id) is stream:
            del streams[words.id]
            if not streams:
                del self._of[words.url]

    def of(self, target: Target) -> Stream | None:
        """The agent of a server. None: it does not listen, or several do and one would get it."""
        streams = self._of.get(target.instance.url, {}).values()
        listening = [stream for stream in streams if self.serves(stream)]
        return listening[0] if len(listening) == 1 and target.rank is None else None

    def serves(self, stream: Stream) -> bool:
        """Whether it is to be told more."""
        return not stream.ended and self._knows(stream.words)

    def end(self) -> None:
        """The router ends: let all answers end first."""
        for streams in list(self._of.values()):
            for stream in streams.values():
                stream.end()


class Ahead:
    """Chooses decoders early enough that their agents can be told.

    Without an agent that listens, and where prefill servers come first, nothing is chosen here.
    """

    def __init__(self, streams: Streams, instances: Instances, counters: Counters) -> None:
        self._streams = streams
        self._instances = instances
        self._counters = counters

    @contextlib.contextmanager
    def request(self) -> Iterator[Hints]:
        """One request's hints. Its decoder has it among its load until the end of this."""
        with contextlib.ExitStack() as expected:
            yield Hints(lambda: self._choose(expected), self._tell)

    def _choose(self, expected: contextlib.ExitStack) -> Target | None:
        if not len(self._streams) or self._instances.of(Role.PREFILL):
            return None
        targets = self._instances.targets(Role.DECODE)
        if not targets:
            return None
        target = least_loaded(targets)
        expected.enter_context(target.expecting())
        return target

    def _tell(self, target: Target, lines: list[bytes]) -> None:
        stream = self._streams.of(target)
        for line in lines if stream is not None else ():
            told = stream is not None and stream.offer(line)
            self._counters.hints.labels("told" if told else "dropped").inc()


class Hints:
    """One request's.

    Attributes:
        target: its decoder, as soon as one was told something, or could have been.
    """

    def __init__(
        self, choose: Callable[[], Target | None], tell: Callable[[Target, list[bytes]], None]
    ) -> None:
        self._choose = choose
        self._tell = tell
        self.target: Target | None = None

    def announced(self, params: Mapping[str, Any]) -> None:
        """An encoder has announced items of this request."""
        lines = hint_lines(params)
        if not lines:
            return
        self.target = self.target or self._choose()
        if self.target is not None:
            self._tell(self.target, lines)


class Listening:
    """``POST /instances/ahead``."""

    def __init__(self, registrar: Registrar, streams: Streams, budget: Budget) -> None:
        self._registrar = registrar
        self._streams = streams
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            with self._budget.request() as share:
                raw = bytes(await read_body(request, MAX_BYTES, share))
            words = self._registrar.read(request.headers.get("authorization", ""), raw)
            stream = self._streams.open(words)
        except ClientDisconnect:
            return
        except (OverloadError, RefusedError) as error:
            status = error.status if isinstance(error, RefusedError) else 503
            await PlainTextResponse(str(error), status)(scope, receive, send)
            return
        try:
            await until_disconnect(self._answer(stream, send), receive)
        except ClientDisconnect:
            logger.info("the agent of %s listens no more", words.url)
        finally:
            self._streams.close(stream)

    async def _answer(self, stream: Stream, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        lines = b"\n"
        while self._streams.serves(stream):
            await send({"type": "http.response.body", "body": lines, "more_body": True})
            lines = await stream.next(KEEP_ALIVE) or b"\n"
        await send({"type": "http.response.body", "body": b"", "more_body": False})
