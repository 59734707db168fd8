# SPDX-License-Identifier: Apache-2.0
"""The side of a stage that asks: named tensors in, named tensors out, by a deadline."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from ec_connector.stage.assembly import Arrays, Refused
from ec_connector.stage.errors import StageDeadlineError, StageError, StageLostError
from ec_connector.stage.link import Link
from ec_connector.stage.messages import (
    DEFAULT_PAYLOAD_BYTES,
    Close,
    Hello,
    Load,
    Ok,
    Request,
    Run,
    Stats,
)

START_SECONDS = 30.0
CALL_SECONDS = 60.0
LOAD_SECONDS = 300.0
_END_SECONDS = 1.0  # a connection ends a moment before its process
_LOOK_SECONDS = 0.25  # how often a worker of our own is looked after


class Stage:
    """A worker that was started elsewhere, reached at an address or expected at one.

    One call at a time; further threads wait. After a :class:`StageLostError` or a
    :class:`StageDeadlineError` each call raises at once: make another stage.

    Args:
        connect: ``host:port`` where a worker listens, or empty.
        listen: ``host:port`` where a worker will connect, or empty.
        payload_limit: most bytes of tensors in one message, either way.
        curve_keys: see :class:`ec_connector.stage.link.Link`.
        token: what a worker that connects must show, if anything.

    Raises:
        ConfigError: an address or a key cannot be used.
    """

    def __init__(
        self,
        *,
        connect: str = "",
        listen: str = "",
        payload_limit: int = DEFAULT_PAYLOAD_BYTES,
        curve_keys: Path | None = None,
        token: str = "",
    ) -> None:
        self._link = Link(
            connect=connect, listen=listen, limit=payload_limit, curve_keys=curve_keys
        )
        self._token = token
        self._lock = threading.Lock()
        self._peer = b""
        self._calls = 0
        self._broken = ""

    @property
    def address(self) -> str:
        """``host:port`` of this stage, with the port that was taken."""
        return self._link.address

    def hello(self, timeout: float = START_SECONDS) -> dict[str, Any]:
        """Wait for the worker; who it is: interpreter, platform, versions, providers, graphs.

        Raises:
            StageError: see the module; each call may raise these.
        """
        with self._lock:
            if self._link.listens and not self._peer:
                self._expect(time.monotonic() + timeout, timeout)
        return self._call(Hello(), {}, timeout)[0]

    def load(
        self, graph: str, providers: Sequence[str] = (), timeout: float = LOAD_SECONDS
    ) -> dict[str, Any]:
        """Open a graph by the worker's name for it: where it was placed, with which provider
        and why, and what goes in and comes out."""
        return self._call(Load(graph=graph, providers=list(providers)), {}, timeout)[0]

    def run(
        self,
        graph: str,
        inputs: Mapping[str, np.ndarray[Any, Any]],
        outputs: Sequence[str] = (),
        timeout: float = CALL_SECONDS,
    ) -> Arrays:
        """Run a loaded graph. The arrays that come are writable and the caller's own."""
        return self._call(Run(graph=graph, outputs=list(outputs)), inputs, timeout)[1]

    def stats(self, timeout: float = CALL_SECONDS) -> dict[str, Any]:
        """What the worker has done and the memory it uses, in bytes (None: it cannot tell)."""
        return self._call(Stats(), {}, timeout)[0]

    def close(self) -> None:
        """Say goodbye and close the connection. Idempotent."""
        if not self._broken:
            # It may be gone already; then nobody is left to tell.
            with contextlib.suppress(StageError):
                self._call(Close(), {}, 2.0)
            self._broken = "this stage was closed"
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ended(self, patience: float = 0.0) -> str:
        """How the worker's process ended, where this is known; empty while it may live.

        ``patience`` is how many seconds to wait for its end.
        """
        del patience
        return ""

    def _expect(self, until: float, timeout: float) -> None:
        """Take the first worker that connects and shows the token."""
        while not self._peer:
            peer, message, _ = self._receive(until, timeout, "to connect")
            if isinstance(message, Ok) and message.id == 0:
                shown = str(message.facts.get("token", ""))
                if secrets.compare_digest(shown.encode(), self._token.encode()):
                    self._peer = peer

    def _call(
        self, request: Request, arrays: Mapping[str, np.ndarray[Any, Any]], timeout: float
    ) -> tuple[dict[str, Any], Arrays]:
        with self._lock:
            if self._broken:
                raise StageLostError(f"{self._broken}; make another stage")
            self._calls += 1
            number = self._calls
            try:
                return self._converse(number, request, arrays, timeout)
            except (StageLostError, StageDeadlineError) as error:
                self._broken = error.message
                raise

    def _converse(
        self,
        number: int,
        request: Request,
        arrays: Mapping[str, np.ndarray[Any, Any]],
        timeout: float,
    ) -> tuple[dict[str, Any], Arrays]:
        until = time.monotonic() + timeout
        what = f"to answer {type(request).__name__.lower()}"
        try:
            self._link.send(self._peer, _numbered(request, number), arrays, until)
        except StageLostError:
            raise StageLostError(self._obituary(what)) from None
        except StageDeadlineError:
            text = f"the worker at {self.address} did not take the request within {timeout:g} s"
            raise StageDeadlineError(text) from None
        while True:
            peer, message, received = self._receive(until, timeout, what)
            if peer != self._peer:
                continue
            if isinstance(message, Refused):
                if message.id == number:
                    raise StageError(message.code, f"the answer is not taken: {message.message}")
                if message.id == 0:
                    raise StageLostError(f"the worker's answer cannot be read: {message.message}")
            elif message.id == number:
                if isinstance(message, Ok):
                    return message.facts, received
                code, text = (
                    getattr(message, "code", "bad_message"),
                    getattr(message, "message", ""),
                )
                raise StageError(
                    code, text or f"unexpected {message}", getattr(message, "traceback", "")
                )

    def _receive(self, until: float, timeout: float, what: str) -> tuple[bytes, Any, Arrays]:
        while True:
            try:
                return self._link.receive(min(until, time.monotonic() + _LOOK_SECONDS), self._peer)
            except StageLostError:
                raise StageLostError(self._obituary(what)) from None
            except TimeoutError:
                if self.ended():
                    raise StageLostError(self._obituary(what)) from None
                if time.monotonic() >= until:
                    raise StageDeadlineError(
                        f"the worker at {self.address} was waited for {what}, "
                        f"longer than {timeout:g} s"
                    ) from None

    def _obituary(self, what: str) -> str:
        how = self.ended(_END_SECONDS) or "ended or the connection to it broke"
        return f"the worker at {self.address} {how} while it was waited for {what}"


def _numbered(request: Request, number: int) -> Request:
    return msgspec.structs.replace(request, id=number)
