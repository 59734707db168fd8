# SPDX-License-Identifier: Apache-2.0
"""Listening to a router for items to fetch ahead: one HTTP request whose answer does not end.

A thread of its own reads; the agent's loop takes the lines. While it has not taken the last ones
nothing more is read: a router that says too much drops what does not fit.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from ec_connector.agent.reactor import Reactor
from ec_connector.config import Settings
from ec_connector.protocol.ahead import Lines, Pace
from ec_connector.token_file import load_token

logger = logging.getLogger("vllm.ec_connector.agent")

PATH: Final = "/instances/ahead"
CONNECT_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 20.0
"""A router sends at least an empty line every five."""
FIRST_WAIT: Final = 1.0
LONGEST_WAIT: Final = 30.0
_READ_BYTES: Final = 8192
_BYTES_A_LINE: Final = 256
_NOT_YET: Final = 409
"""The router's answer to an engine that it does not know yet: asked again soon, not a fault."""


class Hints:
    """A router's hints, from :meth:`start` to :meth:`close`.

    Args:
        settings: ``proxy_url``, ``http_url`` and ``proxy_token`` are all set.
        serves, agent_id: as for :class:`ec_connector.agent.registration.Registration`.
        reactor: waits for lines.
        take: gets them, in the reactor's thread.

    Raises:
        ConfigError: the token's file cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        serves: tuple[str, ...],
        agent_id: str,
        reactor: Reactor,
        take: Callable[[list[bytes]], None],
    ) -> None:
        self._url = urlsplit(settings.proxy_url)
        self._place = f"{settings.proxy_url.rstrip('/')}{PATH}"
        words = {"url": settings.http_url, "serves": list(serves), "id": agent_id}
        self._words = json.dumps(words).encode()
        self._token = load_token("proxy_token", settings.proxy_token)
        self._reactor = reactor
        self._take = take
        self._lines: queue.Queue[list[bytes]] = queue.Queue(maxsize=1)
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        reactor.add(self._wake_out, self._read)
        self._socket: socket.socket | None = None
        self._known = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hints", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        connected = self._socket  # the thread may forget it meanwhile
        if connected is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)  # ends a read that waits
        if self._thread.ident is not None:
            self._thread.join(1.0)
        self._reactor.remove(self._wake_out)
        if not self._thread.is_alive():  # else it might write into whatever has this number next
            os.close(self._wake_in)
            os.close(self._wake_out)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 4096)
        with contextlib.suppress(queue.Empty):
            self._take(self._lines.get_nowait())

    # ── the thread ───────────────────────────────────────────────────────────

    def _run(self) -> None:
        wait = FIRST_WAIT
        while not self._closing.is_set():
            fault, served = self._listen()
            if self._closing.is_set():
                return
            self._say(fault)
            wait = FIRST_WAIT if served else min(2 * wait, LONGEST_WAIT)
            self._closing.wait(wait)

    def _listen(self) -> tuple[str, bool]:
        """Read until the answer ends. Why it did, and whether another may be had soon."""
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else None
        connection = (kind or http.client.HTTPConnection)(
            self._url.hostname or "", self._url.port, timeout=CONNECT_SECONDS
        )
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        try:
            with contextlib.closing(connection):
                connection.connect()
                self._socket = connection.sock
                if self._closing.is_set():
                    return "", False
                connection.request("POST", PATH, self._words, headers)
                with connection.getresponse() as response:
                    if response.status == _NOT_YET:
                        return self._known, True
                    if response.status != 200:
                        said = response.read(300).decode("utf-8", "replace")
                        return f"it answers {response.status}: {said}", False
                    self._socket.settimeout(SILENCE_SECONDS)
                    self._say("")
                    self._follow(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(error) or type(error).__name__, False
        finally:
            self._socket = None
        return self._known, True

    def _follow(self, response: http.client.HTTPResponse) -> None:
        lines, pace = Lines(), Pace(time.monotonic())
        while data := response.read1(_READ_BYTES):
            found = lines.feed(data)
            if found and not self._hand_over(found):
                return
            # Empty lines and long ones are work too.
            work = max(data.count(b"\n"), len(data) // _BYTES_A_LINE)
            if self._closing.wait(pace.pause(work, time.monotonic())):
                return

    def _hand_over(self, lines: list[bytes]) -> bool:
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                self._lines.put(lines, timeout=1.0)
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_in, b"!")
                return True
        return False

    def _say(self, fault: str) -> None:
        if fault and fault != self._known:
            logger.warning("no hints from %s: %s", self._place, fault)
        elif self._known and not fault:
            logger.info("hints from %s again", self._place)
        self._known = fault
