# SPDX-License-Identifier: Apache-2.0
"""A producer whose saves, failures and death are in a test's hands."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ec_connector.arrays import bytes_of
from ec_connector.errors import AgentLostError, AgentStartError
from ec_connector.library import Producer
from ec_connector.protocol.local import ReservedItem, ReserveItem, SaveFailed

_END_SECONDS = 5.0


class FakeProducer(Producer):
    """A :class:`ec_connector.Producer` that can also be late, fail, die and hang.

    It takes the same arguments. What consumers see is the real thing: an agent
    process of its own, its sockets and its pool.
    """

    def __init__(self, *, factors: Mapping[str, object] | None = None, **settings: Any) -> None:
        super().__init__(factors=factors, **settings)
        self._unsaved: dict[str, tuple[ReservedItem, np.ndarray[Any, Any]]] = {}
        self._paused = 0
        self._killed = ""

    def announce(
        self, key: str, array: np.ndarray[Any, Any], dtype: str = "", *, modality: str = "image"
    ) -> dict[str, Any]:
        """The announcement of an item that is not saved yet: whoever asks for it waits.

        :meth:`land` saves it, :meth:`fail` says that it will never be. Raises as ``put``.
        """
        name, raw = bytes_of(array, dtype)
        item = ReserveItem(key, raw.nbytes, name, list(array.shape))
        with self._lock:
            self._attach()
            self._unsaved[key] = self._reserve(item), raw
            return self._announcement(item, modality)

    def land(self, key: str) -> None:
        """Save an announced item. Raises KeyError if there is none of that key."""
        with self._lock:
            self._attach()
            self._save(*self._unsaved.pop(key))

    def fail(self, key: str, message: str, traceback: str = "") -> None:
        """Let the save of an announced item fail. Raises KeyError if there is none."""
        with self._lock:
            self._attach()
            place, _ = self._unsaved.pop(key)
            if not self._link.send(SaveFailed(key, place.generation, message, traceback)):
                raise AgentLostError("the agent was lost")

    def kill(self) -> None:
        """SIGKILL the agent and return when it is gone, with all that it held.

        Another is started after a moment, as in an engine; see :meth:`recover`.
        """
        fd = os.pidfd_open(self.agent_pid)
        try:
            self._killed = self._welcome.agent_id
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            # Not waitpid: the exit status belongs to the link that started it.
            ended = select.poll()
            ended.register(fd, select.POLLIN)
            ended.poll(_END_SECONDS * 1000)
        finally:
            os.close(fd)
        self._unsaved.clear()
        self._paused = 0

    def recover(self, timeout: float = 10.0) -> None:
        """Wait until the agent serves that follows a killed one.

        Raises:
            AgentStartError: not within ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            with self._lock, suppress(AgentLostError):
                self._attach()
                if self._welcome.agent_id != self._killed:
                    return
            time.sleep(0.02)
        raise AgentStartError(f"no other agent serves after {timeout:g} s")

    def pause(self) -> None:
        """SIGSTOP the agent: from the return on it neither answers nor hangs up."""
        self._paused = self.agent_pid
        os.kill(self._paused, signal.SIGSTOP)
        # Left for others to wait for; an agent that is not our child stops a moment later.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._paused, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT a paused agent."""
        paused, self._paused = self._paused, 0
        if paused:
            os.kill(paused, signal.SIGCONT)

    def close(self) -> None:
        """As ``Producer.close``; a paused agent is resumed first, so that it can end in order."""
        self.resume()
        super().close()
