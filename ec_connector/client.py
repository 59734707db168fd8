# SPDX-License-Identifier: Apache-2.0
"""The thin half of an agent that lives in an engine's process: one ipc DEALER.

Nothing here waits for the agent unless the caller names a timeout.
"""

from __future__ import annotations

import contextlib
import os
import time
from types import TracebackType

import zmq

from ec_connector.errors import AgentLostError
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import (
    LOCAL_VERSION,
    Hello,
    Refused,
    ToAgent,
    ToClient,
    Welcome,
    decode_to_client,
    encode_local,
)

_MAX_QUEUED = 10_000
"""Messages held for an agent that does not read; beyond it, ``send`` says no."""


class AgentClient:
    """A connection to an agent of this host and user. Not thread-safe: one per thread.

    Args:
        endpoint: ``ipc://...`` as the agent printed or the engine's metadata says.
        role: ``"scheduler"``, ``"worker"`` or ``"client"``.
        identity: what this process's engine is; an agent of another kind refuses it.
    """

    def __init__(self, endpoint: str, role: str, identity: Identity | None = None) -> None:
        self.endpoint = endpoint
        # Own context: ZMQ's global one may have been forked, or be ended by others.
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A dead agent's name is never used again, so there is nothing to reconnect to.
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.connect(endpoint)
        self._inbox: list[ToClient] = []
        known = identity or Identity()
        hello = Hello(os.getpid(), role, LOCAL_VERSION, known.compatibility_hash, known.factors)
        self.send(hello)

    def send(self, message: ToAgent) -> bool:
        """Queue a message. Never blocks; False when the queue is full or closed."""
        try:
            self._socket.send(encode_local(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self, timeout: float = 0.0) -> list[ToClient]:
        """All messages that are here, waiting up to ``timeout`` seconds for the first."""
        messages, self._inbox = self._inbox, []
        if not messages and timeout > 0:
            self._socket.poll(int(timeout * 1000) + 1)
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            except zmq.ZMQError:
                return messages
            messages.append(decode_to_client(frame))

    def hello(self, timeout: float) -> Welcome:
        """The agent's welcome; other messages that come first are kept for ``receive``.

        Raises:
            AgentLostError: no answer within ``timeout`` seconds, another version, or
                an agent of another kind (the text names the factor).
        """
        until = time.monotonic() + timeout
        kept: list[ToClient] = []
        while (left := until - time.monotonic()) > 0:
            for message in self.receive(left):
                if isinstance(message, Refused):
                    raise AgentLostError(f"the agent at {self.endpoint} refuses: {message.message}")
                if not isinstance(message, Welcome):
                    kept.append(message)
                elif message.version != LOCAL_VERSION:
                    raise AgentLostError(
                        f"the agent at {self.endpoint} speaks local version {message.version}, "
                        f"this process {LOCAL_VERSION}: install the same ec-connector for both"
                    )
                else:
                    self._inbox = kept + self._inbox
                    return message
        raise AgentLostError(f"no agent answered at {self.endpoint} within {timeout:g} s")

    def close(self) -> None:
        """Close the connection. Messages not yet sent get 50 ms to leave."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.close(linger=50)
            self._context.term()

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
