# SPDX-License-Identifier: Apache-2.0
"""The processes of this host that use the agent: who they are, and talking with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from ec_connector.agent.lifeline import Lifelines
from ec_connector.agent.listen import bind_local
from ec_connector.agent.reactor import Reactor
from ec_connector.agent.receive import discard_rest, has_message
from ec_connector.errors import WireError
from ec_connector.protocol.local import (
    Hello,
    Refused,
    ToAgent,
    ToClient,
    decode_to_agent,
    encode_local,
)

logger = logging.getLogger("vllm.ec_connector.agent")

ENGINE: Final = b"engine"
"""Who reserves for an engine: its scheduler asks for room, its worker fills it."""
_BUDGET = 64
"""Messages taken before other sockets have their turn."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """Where to take what clients do. Times are the agent's business.

    Attributes:
        hello: a client says who it is; the answer to give it. Raises WireError to refuse it.
        message: anything else, with the client and the owner of what it reserves.
        gone: owners whose processes have all ended, and every client that ended with them.
    """

    hello: Callable[[Hello], ToClient]
    message: Callable[[bytes, bytes, ToAgent], None]
    gone: Callable[[list[bytes], list[bytes]], None]


class Clients:
    """The local socket and everybody who said hello on it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        reactor: Reactor,
        lifelines: Lifelines,
        handlers: Handlers,
    ) -> None:
        self._socket, self.endpoint = bind_local(context)
        self._lifelines = lifelines
        self._handlers = handlers
        self._hello_of: dict[bytes, Hello] = {}
        reactor.add(self._socket, self._read)

    def __len__(self) -> int:
        return len(self._hello_of)

    def tell(self, client: bytes, message: ToClient) -> None:
        """Send a message; one that cannot be sent is to a process that is ending."""
        try:
            self._socket.send_multipart([client, encode_local(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The lifeline will say so, and clear what it held.
            logger.debug("client %s cannot be told: %s", client.hex(), error)

    def process_ended(self, pid: int) -> None:
        """A process ended: forget its clients and tell of them."""
        clients = [client for client, hello in self._hello_of.items() if hello.pid == pid]
        owners = {self._owner(client) for client in clients}
        for client in clients:
            del self._hello_of[client]
        owners -= {self._owner(client) for client in self._hello_of}
        if clients:
            self._handlers.gone(clients, sorted(owners))

    def _owner(self, client: bytes) -> bytes:
        return client if self._hello_of[client].role == "client" else ENGINE

    def _read(self) -> None:
        for _ in range(_BUDGET):
            if not has_message(self._socket):
                return
            client = self._socket.recv()
            frame = self._socket.recv() if self._socket.getsockopt(zmq.RCVMORE) else b""
            extra = discard_rest(self._socket)
            try:
                if extra:
                    raise WireError(f"{2 + extra} frames; 2 were due")
                self._take(client, decode_to_agent(frame))
            except WireError as error:
                logger.error("a client's message was refused: %s", error)
                self.tell(client, Refused(str(error)))

    def _take(self, client: bytes, message: ToAgent) -> None:
        if isinstance(message, Hello):
            welcome = self._handlers.hello(message)
            self._hello_of[client] = message
            self.tell(client, welcome)
            if not self._lifelines.watch(message.pid):
                self.process_ended(message.pid)
        elif client in self._hello_of:
            self._handlers.message(client, self._owner(client), message)
        else:
            raise WireError(f"{type(message).__name__} before Hello")
