# SPDX-License-Identifier: Apache-2.0
"""The thin half of an agent that lives in an engine's process: one local connection.

Nothing here waits for the agent unless the caller names a timeout.
"""

from __future__ import annotations

import logging
import os
import select
import time
from types import TracebackType

from ec_connector.agent.channel import Channel, connect
from ec_connector.errors import AgentLostError, WireError
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

logger = logging.getLogger("vllm.ec_connector.client")

LINGER_SECONDS = 0.05


class AgentClient:
    """A connection to an agent of this host and user. Not thread-safe: one per thread.

    Args:
        endpoint: ``ipc://...`` as the agent printed or the engine's metadata says.
        role: ``"scheduler"``, ``"worker"`` or ``"client"``.
        identity: what this process's engine is; an agent of another kind refuses it.

    Where nobody listens, :meth:`hello` says so.
    """

    def __init__(self, endpoint: str, role: str, identity: Identity | None = None) -> None:
        self.endpoint = endpoint
        self._channel: Channel | None = None
        self._fault = "it does not answer"
        try:
            self._channel = connect(endpoint)
        except OSError as error:
            self._fault = str(error)
        self._inbox: list[ToClient] = []
        known = identity or Identity()
        hello = Hello(os.getpid(), role, LOCAL_VERSION, known.compatibility_hash, known.factors)
        self.send(hello)

    @property
    def ended(self) -> bool:
        """Whether the agent has gone away; what it sent before can still be received."""
        return self._channel is None or self._channel.ended

    def send(self, message: ToAgent) -> bool:
        """Send a message or queue it. Never waits, never raises.

        False when the queue is full, the agent gone, or the message holds what cannot be
        written (half a surrogate pair, a number of over 64 bits), which is logged.
        """
        try:
            frame = encode_local(message)
        except WireError as error:
            logger.error("%s not sent: %s", type(message).__name__, error)
            return False
        return self._channel is not None and self._channel.send(frame)

    def receive(self, timeout: float = 0.0) -> list[ToClient]:
        """All messages that are here, waiting up to ``timeout`` seconds for the first.

        An agent that says what cannot be understood is given up, which is logged.
        """
        messages, self._inbox = self._inbox, []
        if self._channel is None:
            return messages
        until = time.monotonic() + timeout
        self._channel.flush()
        while True:
            frames = self._channel.receive()
            messages += self._decoded(frames)
            if not frames and (messages or self.ended or not self._ready(until)):
                return messages

    def hello(self, timeout: float) -> Welcome:
        """The agent's welcome; other messages that come with it are kept for ``receive``.

        Raises:
            AgentLostError: no answer within ``timeout`` seconds, another version, or
                an agent of another kind (the text names the factor).
        """
        until = time.monotonic() + timeout
        kept: list[ToClient] = []
        while (left := until - time.monotonic()) > 0:
            messages = self.receive(left)
            for number, message in enumerate(messages, start=1):
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
                    self._inbox = kept + messages[number:]
                    return message
            if self.ended:
                raise AgentLostError(f"no agent at {self.endpoint}: {self._fault}")
        raise AgentLostError(f"no agent answered at {self.endpoint} within {timeout:g} s")

    def close(self) -> None:
        """Close the connection. Messages not yet sent get 50 ms to leave."""
        if self._channel is not None:
            until = time.monotonic() + LINGER_SECONDS
            while self._channel.unsent and not self._channel.ended and self._ready(until):
                self._channel.flush()
            self._channel.close()

    def _decoded(self, frames: list[bytes]) -> list[ToClient]:
        messages = []
        for frame in frames:
            try:
                messages.append(decode_to_client(frame))
            except WireError as error:
                self._fault = f"what it says cannot be understood ({error})"
                logger.error("agent at %s given up: %s", self.endpoint, self._fault)
                if self._channel is not None:
                    self._channel.close()
                break
        return messages

    def _ready(self, until: float) -> bool:
        """Wait until something can be read, or sent if there is something to send."""
        channel = self._channel
        left = until - time.monotonic()
        if channel is None or left <= 0:
            return False
        poll = select.poll()  # select() fails where the engine has over 1024 descriptors
        poll.register(channel.fd, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
        if not poll.poll(left * 1000):
            return False
        channel.flush()
        return True

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
