# SPDX-License-Identifier: Apache-2.0
"""Noticing the death of other processes, however they die, without polling."""

from __future__ import annotations

import os
from collections.abc import Callable


class Lifelines:
    """Processes whose end matters. Each is watched through a descriptor that a poller can wait on.

    A pidfd becomes readable when its process ends, ``kill -9`` included, and
    cannot be fooled by a recycled pid.
    """

    def __init__(self, register: Callable[[int], None], unregister: Callable[[int], None]) -> None:
        self._register = register
        self._unregister = unregister
        self._pid_of: dict[int, int] = {}
        self._fd_of: dict[int, int] = {}

    def watch(self, pid: int) -> bool:
        """Watch a process. False when it is gone already."""
        if pid in self._fd_of:
            return True
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False
        self._pid_of[fd], self._fd_of[pid] = pid, fd
        self._register(fd)
        return True

    def ended(self, ready: dict[object, int]) -> list[int]:
        """Watched processes that ended, out of what a poll returned."""
        pids = [pid for fd, pid in self._pid_of.items() if fd in ready]
        for pid in pids:
            self._close(pid)
        return pids

    def close(self) -> None:
        """Stop watching."""
        for pid in list(self._fd_of):
            self._close(pid)

    def _close(self, pid: int) -> None:
        fd = self._fd_of.pop(pid)
        del self._pid_of[fd]
        self._unregister(fd)
        os.close(fd)
