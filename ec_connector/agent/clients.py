# SPDX-License-Identifier: Apache-2.0
"""The processes of this host that use the agent: who they are, and talking with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from msgspec.structs import replace

from ec_connector.agent.channel import Channel, accept, listen
from ec_connector.agent.lifeline import Lifelines
from ec_connector.agent.reactor import Reactor
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


@dataclass(frozen=True, slots=True)
class Handlers:
    """Where to take what clients do. Times are the agent's business.

    Attributes:
        hello: a client says who it is; the answer to give it. Raises WireError to refuse it.
        message: anything else, with the client and the owner of what it reserves.
        gone: clients that ended, and owners that have no client any more.
    """

    hello: Callable[[Hello], ToClient]
    message: Callable[[bytes, bytes, ToAgent], None]
    gone: Callable[[list[bytes], list[bytes]], None]


class Clients:
    """The local socket, the connections on it, and who said hello on which."""

    def __init__(self, reactor: Reactor, lifelines: Lifelines, handlers: Handlers) -> None:
        self._listener, self.endpoint = listen()
        self._reactor = reactor
        self._lifelines = lifelines
        self._handlers = handlers
        self._channels: dict[bytes, Channel] = {}
        self._hello_of: dict[bytes, Hello] = {}
        self._accepted = 0
        reactor.add(self._listener.fileno(), self._accept)

    def __len__(self) -> int:
        return len(self._hello_of)

    def __contains__(self, client: bytes) -> bool:
        return client in self._hello_of

    def tell(self, client: bytes, message: ToClient) -> None:
        """Send a message. One that reads nothing for too long is given up."""
        channel = self._channels.get(client)
        if channel is None:
            return
        if not channel.send(encode_local(message)):
            logger.error("client %s does not read, or is gone: given up", client.decode())
            self._end([client])
        elif channel.unsent:
            self._reactor.watch_writing(channel.fd, True)

    def became(
        self, client: bytes, factors: dict[str, str], objection: Callable[[Hello], str]
    ) -> None:
        """A client is something else than it said; end those to which this is an objection."""
        if client in self._hello_of:
            self._hello_of[client] = replace(self._hello_of[client], factors=factors)
        for other, hello in list(self._hello_of.items()):
            if why := objection(hello):
                logger.warning("client %s is turned away: %s", other.decode(), why)
                self.tell(other, Refused(why))
                if other in self._channels:
                    self._end([other])

    def process_ended(self, pid: int) -> None:
        """A process ended; a child of it may still hold the connection open."""
        self._end([client for client, hello in self._hello_of.items() if hello.pid == pid])

    def close(self) -> None:
        """End every connection and listen no more."""
        for channel in self._channels.values():
            channel.close()
        self._listener.close()

    def _accept(self) -> None:
        channel = accept(self._listener)
        if channel is not None:
            self._accepted += 1
            client = b"%d" % self._accepted
            self._channels[client] = channel
            self._reactor.add(channel.fd, partial(self._serve, client, channel))

    def _serve(self, client: bytes, channel: Channel) -> None:
        if channel.unsent:
            channel.flush()
            self._reactor.watch_writing(channel.fd, channel.unsent > 0)
        for frame in channel.receive():
            if client not in self._channels:
                return
            try:
                self._take(client, decode_to_agent(frame))
            except WireError as error:
                logger.error("a client's message was refused: %s", error)
                self.tell(client, Refused(str(error)))
        if channel.ended and client in self._channels:
            self._end([client])

    def _end(self, clients: list[bytes]) -> None:
        known = [client for client in clients if client in self._hello_of]
        owners = {self._owner(client) for client in known}
        for client in clients:
            channel = self._channels.pop(client)
            self._reactor.remove(channel.fd)
            channel.close()
            self._hello_of.pop(client, None)
        owners -= {self._owner(client) for client in self._hello_of}
        if known:
            self._handlers.gone(known, sorted(owners))

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

    def _owner(self, client: bytes) -> bytes:
        return client if self._hello_of[client].role == "client" else ENGINE
