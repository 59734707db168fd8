# SPDX-License-Identifier: Apache-2.0
"""A network that can be told to fail: bytes pass, wait, come late, or connections break."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

UP, DOWN = "up", "down"
"""From the consumer to the producer, and back."""
PIECE = 64 * 1024


@dataclass(eq=False)
class _Way:
    """One direction of one connection."""

    name: str
    source: socket.socket
    target: socket.socket
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    peer: _Way | None = None


class Relay:
    """Stands at an address of its own and passes bytes to the target's.

    Attributes:
        passed: bytes that went each way so far.
        delay: seconds that each byte is late.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.passed = {UP: 0, DOWN: 0}
        self.delay = 0.0
        self._limit: dict[str, int | None] = {UP: None, DOWN: None}
        self._refusing = False
        self._ways: list[_Way] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def hold(self, *ways: str, after: int = 0) -> None:
        """Let so many bytes more pass, then keep what comes; connections stay open."""
        with self._lock:
            for way in ways or (UP, DOWN):
                self._limit[way] = self.passed[way] + after

    def let_pass(self, *ways: str) -> None:
        """Pass everything again, first what was kept."""
        with self._lock:
            for way in ways or (UP, DOWN):
                self._limit[way] = None

    def cut(self) -> None:
        """Break every connection, and refuse new ones."""
        with self._lock:
            self._refusing = True
            for way in list(self._ways):
                self._end(way)

    def mend(self, port: int | None = None) -> None:
        """Take connections again, to another port if one is given."""
        with self._lock:
            self._target = (self._target[0], port or self._target[1])
            self._refusing = False

    def close(self) -> None:
        """End all of it."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.001):
            with self._lock:
                self._accept()
                for way in list(self._ways):
                    self._pass(way)
        with self._lock:
            for way in list(self._ways):
                self._end(way)
        self._listener.close()

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except BlockingIOError:
            return
        if self._refusing:
            near.close()
            return
        try:
            far = socket.create_connection(self._target, 1.0)
        except OSError:
            near.close()
            return
        for one in (near, far):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up, down = _Way(UP, near, far), _Way(DOWN, far, near)
        up.peer, down.peer = down, up
        self._ways += [up, down]

    def _pass(self, way: _Way) -> None:
        if way not in self._ways:
            return
        try:
            while len(way.waiting) < 64:
                data = way.source.recv(PIECE)
                if not data:
                    self._end(way)
                    return
                way.waiting.append((time.monotonic() + self.delay, data))
        except BlockingIOError:
            pass
        except OSError:
            self._end(way)
            return
        self._send(way)

    def _send(self, way: _Way) -> None:
        while way.waiting and way.waiting[0][0] <= time.monotonic():
            due, data = way.waiting[0]
            limit = self._limit[way.name]
            most = len(data) if limit is None else min(len(data), limit - self.passed[way.name])
            if most <= 0:
                return
            try:
                sent = way.target.send(data[:most])
            except BlockingIOError:
                return
            except OSError:
                self._end(way)
                return
            self.passed[way.name] += sent
            way.waiting.popleft()
            if sent < len(data):
                way.waiting.appendleft((due, data[sent:]))

    def _end(self, way: _Way) -> None:
        for one in (way, way.peer):
            if one is not None and one in self._ways:
                self._ways.remove(one)
        way.source.close()
        way.target.close()
