# SPDX-License-Identifier: Apache-2.0
"""Connections to producers: one DEALER and its monitor per address.

Addresses come from clients' requests. A name is resolved in a thread (a slow
name server must not stop the loop), every address it stands for is checked
against the allow-list, and what was checked is what is dialled.
"""

from __future__ import annotations

import ipaddress
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import zmq
from zmq.utils.monitor import recv_monitor_message

from ec_connector.agent.listen import (
    CURVE_BYTES,
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    WAITING_IN,
)
from ec_connector.agent.reactor import Reactor
from ec_connector.curve import Credentials
from ec_connector.errors import PeerRefusedError
from ec_connector.protocol.addresses import AllowList
from ec_connector.protocol.effects import Address

RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
MAX_LOOKUPS = 128
"""Names being looked up at one time, a thread each. Clients choose the names, and a name server
may take half a minute for each."""

_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


_NOT_LET_IN = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(frozen=True, slots=True)
class Up:
    """The connection to ``address`` is ready."""

    address: Address


@dataclass(frozen=True, slots=True)
class Down:
    """The connection to ``address`` broke, or an attempt failed. It is retried."""

    address: Address


@dataclass(frozen=True, slots=True)
class Refused:
    """``address`` may not be dialled, or stands for nothing."""

    address: Address
    message: str


Change = Up | Down | Refused


@dataclass(slots=True)
class _Connection:
    """``endpoints``: what the address stands for, the one that is being dialled first."""

    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    endpoints: list[str]
    was_up: bool = False

    def dial_next(self) -> None:
        """Try another of the addresses that a name stands for."""
        self.dealer.disconnect(self.endpoints[0])
        self.endpoints.append(self.endpoints.pop(0))
        self.dealer.connect(self.endpoints[0])


class PeerSockets:
    """The DEALER sockets of one agent.

    Args:
        context: the agent's ZMQ context.
        reactor: waits for the sockets.
        allowed: who may be dialled.
        max_frame_bytes: a larger frame ends the connection it came on.
        on_readable: called where a connection has messages.
        keys: with them every connection is CURVE; None: every one is plain.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        reactor: Reactor,
        allowed: AllowList,
        max_frame_bytes: int,
        on_readable: Callable[[Address, zmq.Socket[bytes]], None],
        keys: Credentials | None = None,
    ) -> None:
        self._context = context
        self._reactor = reactor
        self._on_readable = on_readable
        self._allowed = allowed
        self._keys = keys
        self._max_frame_bytes = max_frame_bytes
        self._connections: dict[Address, _Connection] = {}
        self._unsent: dict[Address, list[bytes]] = {}
        self._resolved: queue.SimpleQueue[tuple[Address, list[str] | str]] = queue.SimpleQueue()
        self._lookups = 0
        self._changes: list[Change] = []
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        reactor.add(self._wake_out, self._read_resolved)

    def open(self, address: Address) -> None:
        """Start connecting; :meth:`changes` tells how it goes."""
        self._unsent[address] = []
        try:
            ipaddress.ip_address(address.host)
        except ValueError:
            try:
                self._allowed.check_name(address.host, address.port)
            except PeerRefusedError as error:
                self._changes.append(Refused(address, str(error)))
                return
            if self._lookups >= MAX_LOOKUPS:
                text = f"{address} is not looked up: {MAX_LOOKUPS} other names are, no answer yet"
                self._changes.append(Refused(address, text))
                return
            name = f"resolve-{address.host}"[:60]
            thread = threading.Thread(target=self._resolve, args=(address,), name=name, daemon=True)
            try:
                thread.start()
                self._lookups += 1
            except RuntimeError as error:  # the host gives no more threads
                self._changes.append(Refused(address, f"{address} is not resolved: {error}"))
        else:
            self._dial(address, [address.host])

    def close(self, address: Address) -> None:
        """Forget a peer."""
        self._unsent.pop(address, None)
        connection = self._connections.pop(address, None)
        if connection is not None:
            self._reactor.remove(connection.dealer)
            self._reactor.remove(connection.monitor)
            connection.dealer.disable_monitor()
            connection.monitor.close(linger=0)
            connection.dealer.close(linger=0)

    def close_all(self) -> None:
        """Forget every peer and the wake-up descriptor."""
        for address in list(self._connections):
            self.close(address)
        self._reactor.remove(self._wake_out)
        os.close(self._wake_out)
        os.close(self._wake_in)

    def send(self, address: Address, body: bytes) -> bool:
        """Queue a message to a producer. False when there is no connection to queue it on.

        While the address is still being resolved, messages are kept for it.
        """
        connection = self._connections.get(address)
        if connection is None:
            unsent = self._unsent.get(address)
            if unsent is None:
                return False
            unsent.append(body)
            return True
        try:
            connection.dealer.send_multipart([b"", body], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def changes(self) -> list[Change]:
        """What became of connections since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def pending(self) -> bool:
        """Whether :meth:`changes` has something already, which no turn will report."""
        return bool(self._changes)

    def _read_resolved(self) -> None:
        os.read(self._wake_out, 4096)
        while not self._resolved.empty():
            address, found = self._resolved.get()
            self._lookups -= 1
            if address in self._unsent and address not in self._connections:
                if isinstance(found, str):
                    self._changes.append(Refused(address, found))
                else:
                    self._dial(address, found)

    def _resolve(self, address: Address) -> None:
        found: list[str] | str
        try:
            infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            found = sorted({str(info[4][0]) for info in infos})
        except (OSError, ValueError, OverflowError) as error:  # an odd name, an odd port
            found = f"{address.host!r} does not resolve: {error}"
        self._resolved.put((address, found))
        try:
            os.write(self._wake_in, b"x")
        except OSError:
            return  # the agent is closing, or a wake-up is due already

    def _dial(self, address: Address, found: list[str]) -> None:
        try:
            self._allowed.check(address.host, address.port, found)
        except PeerRefusedError as error:
            self._changes.append(Refused(address, str(error)))
            return
        if self._keys is not None and self._keys.client is None:
            text = f"{address} is not dialled: the directory curve_keys holds no client.key_secret"
            self._changes.append(Refused(address, text))
            return
        try:
            self._connect(address, found)
        except zmq.ZMQError as error:
            self._changes.append(Refused(address, f"{address} cannot be dialled: {error}"))

    def _connect(self, address: Address, found: list[str]) -> None:
        dealer = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, WAITING_IN),
            (zmq.IPV6, 1),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.MAXMSGSIZE, self._max_frame_bytes + CURVE_BYTES),
        ):
            dealer.setsockopt(option, value)
        if self._keys is not None and self._keys.client is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server_public or b"")
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.client.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, self._keys.client.secret)
        try:
            monitor = dealer.get_monitor_socket(_WATCHED)
        except zmq.ZMQError:
            dealer.close(linger=0)
            raise
        self._reactor.add(dealer, partial(self._on_readable, address, dealer))
        hosts = (f"[{ip}]" if ":" in ip else ip for ip in found)
        endpoints = [f"tcp://{host}:{address.port}" for host in hosts]
        connection = _Connection(dealer, monitor, endpoints)
        self._reactor.add(monitor, partial(self._read_monitor, address, connection))
        self._connections[address] = connection
        dealer.connect(endpoints[0])
        for body in self._unsent.pop(address, ()):
            self.send(address, body)

    def _read_monitor(self, address: Address, connection: _Connection) -> None:
        while connection.monitor.poll(0):
            event = recv_monitor_message(connection.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connection.was_up = True
                self._changes.append(Up(address))
                continue
            if event & _NOT_LET_IN:
                # libzmq does not try again after this: whoever comes next dials anew.
                text = (
                    f"{address} does not let us in: our client key is not on its list, only one "
                    "side has curve_keys, or what listens there is something else"
                )
                self._changes.append(Refused(address, text))
                return
            self._changes.append(Down(address))
            retried = event == zmq.EVENT_CONNECT_RETRIED
            if retried and not connection.was_up and len(connection.endpoints) > 1:
                connection.dial_next()
