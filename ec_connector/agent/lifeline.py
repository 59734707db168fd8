# SPDX-License-Identifier: Apache-2.0
"""Noticing the death of other processes, however they die, without polling."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from ec_connector.agent.reactor import Reactor


class Lifelines:
    """Processes whose end matters; ``on_end`` is called with the pid of each that ended.

    A pidfd becomes readable when its process ends, ``kill -9`` included, and
    cannot be fooled by a recycled pid.
    """

    def __init__(self, reactor: Reactor, on_end: Callable[[int], None]) -> None:
        self._reactor = reactor
        self._on_end = on_end
        self._fd_of: dict[int, int] = {}

    def watch(self, pid: int) -> bool:
        """Watch a process. False when it is gone already."""
        if pid in self._fd_of:
            return True
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False
        self._fd_of[pid] = fd
        self._reactor.add(fd, partial(self._ended, pid))
        return True

    def close(self) -> None:
        """Stop watching."""
        for pid in list(self._fd_of):
            self._close(pid)

    def _ended(self, pid: int) -> None:
        self._close(pid)
        self._on_end(pid)

    def _close(self, pid: int) -> None:
        fd = self._fd_of.pop(pid)
        self._reactor.remove(fd)
        os.close(fd)
