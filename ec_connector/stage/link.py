# SPDX-License-Identifier: Apache-2.0
"""One ZMQ socket between a caller and a worker: whole messages in and out, by a deadline.

The side that listens has a ROUTER and may have several peers, the side that connects a DEALER
and one. Either may be the worker. Only ``tcp`` is used, so that it is the same on every system.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from ec_connector.curve import load_keys, public_key
from ec_connector.errors import ConfigError
from ec_connector.stage.assembly import Arrays, Assembly, Refused
from ec_connector.stage.errors import StageDeadlineError, StageLostError
from ec_connector.stage.messages import FRAME_BYTES, Hello, Message, pack

MAX_PEERS = 16
IDLE_SECONDS = 30.0  # a peer that sends no more of its message for so long is forgotten
_QUEUE_FRAMES = 16
_TICK_SECONDS = 0.1
_SUSPICION_SECONDS = 3.0


class Link:
    """See the module.

    Args:
        connect: ``host:port`` of the other side, or empty.
        listen: ``host:port`` to listen on (port 0 takes a free one), or empty.
        limit: most bytes of tensors in one message.
        curve_keys: a folder as ``ec-connector keygen`` makes it; the side that listens needs
            server.key_secret and client.key, the side that connects client.key_secret and
            server.key.

    Raises:
        ConfigError: an address or a key cannot be used.
    """

    def __init__(
        self, *, connect: str = "", listen: str = "", limit: int, curve_keys: Path | None = None
    ) -> None:
        if bool(connect) == bool(listen):
            raise ConfigError("a stage either connects or listens: give one address")
        self.limit = limit
        self.listens = bool(listen)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if listen else zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._authenticator: ThreadAuthenticator | None = None
        self._assemblies: dict[bytes, tuple[float, Assembly]] = {}
        self._suspect_until = 0.0
        try:
            self._set_up(connect, listen)
            if curve_keys is not None:
                self._use_keys(curve_keys)
            self.address = self._open(connect, listen)
        except (ConfigError, zmq.ZMQError) as error:
            self.close()
            if isinstance(error, zmq.ZMQError):
                raise ConfigError(
                    f"cannot use the address {connect or listen!r}: {error}; write host:port"
                ) from error
            raise

    def _set_up(self, connect: str, listen: str) -> None:
        socket = self._socket
        socket.linger = 0
        socket.ipv6 = "[" in connect + listen
        socket.sndhwm = socket.rcvhwm = _QUEUE_FRAMES
        socket.maxmsgsize = FRAME_BYTES
        # Answered by the other side's network thread, also while its Python is busy.
        socket.heartbeat_ivl, socket.heartbeat_timeout = 1000, 5000
        if listen:
            socket.router_mandatory = True  # a frame for a peer that is gone is an error
        else:
            socket.immediate = True  # no frame waits for a connection that may never be

    def _use_keys(self, folder: Path) -> None:
        keys = load_keys(folder)
        if self.listens:
            if keys.server is None:
                raise ConfigError(f"{folder} holds no server.key_secret, which listening needs")
            allowed = public_key(folder / "client.key")
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", _Only(allowed))
            self._socket.curve_server = True
            self._socket.curve_publickey = keys.server.public
            self._socket.curve_secretkey = keys.server.secret
        else:
            if keys.client is None or keys.server_public is None:
                raise ConfigError(f"{folder} holds no client.key_secret, which connecting needs")
            self._socket.curve_serverkey = keys.server_public
            self._socket.curve_publickey = keys.client.public
            self._socket.curve_secretkey = keys.client.secret

    def _open(self, connect: str, listen: str) -> str:
        if connect:
            self._socket.connect(f"tcp://{connect}")
            return connect
        self._socket.bind(f"tcp://{listen}")
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def send(
        self,
        peer: bytes,
        message: Message,
        arrays: Mapping[str, np.ndarray[Any, Any]],
        until: float,
    ) -> None:
        """Send a message to a peer (empty on the side that connects) by ``until`` (monotonic).

        Raises:
            StageError: the arrays cannot be sent; nothing was.
            StageLostError: the peer is gone.
            StageDeadlineError: it does not take all of it in time.
        """
        header, raws = pack(message, arrays, self.limit)
        self._send_frame(peer, header, until)
        for raw in raws:
            for start in range(0, len(raw), FRAME_BYTES):
                self._send_frame(peer, raw[start : start + FRAME_BYTES], until)

    def _send_frame(self, peer: bytes, frame: bytes | memoryview, until: float) -> None:
        parts = [peer, frame] if self.listens else [frame]
        while True:
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
                return
            except zmq.ZMQError as error:
                if error.errno == errno.EHOSTUNREACH:
                    raise StageLostError("the connection to the other side broke") from error
                if error.errno != zmq.EAGAIN:
                    raise
            if time.monotonic() >= until:
                raise StageDeadlineError("the other side took no more bytes before the deadline")
            # A ROUTER is always writable to somebody, so it cannot be waited for.
            self._monitor.poll(2) if self.listens else self._socket.poll(50, zmq.POLLOUT)
            self._note_events()
            if self._lost_for_sure(peer):
                raise StageLostError("the connection to the other side broke")

    def receive(self, until: float, peer: bytes = b"") -> tuple[bytes, Message | Refused, Arrays]:
        """The next message of any peer by ``until`` (monotonic), at most 0.1 s later.

        ``peer`` is the one that is waited for: its loss is an error at once.

        Raises:
            StageLostError: that peer is gone, or the only one there can be.
            TimeoutError: nothing came.
        """
        while True:
            with contextlib.suppress(zmq.Again):
                while True:
                    arrived = self._take(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
                    if arrived is not None:
                        return arrived
            self._note_events()
            if self._lost_for_sure(peer):
                raise StageLostError("the connection to the other side broke")
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            if not self._suspect_until:  # its news are being looked into
                poller.register(self._monitor, zmq.POLLIN)
            suspicious = bool(self._suspect_until)
            poller.poll(int(1000 * min(left, _TICK_SECONDS if suspicious else left)) + 1)

    def _take(self, parts: list[zmq.Frame]) -> tuple[bytes, Message | Refused, Arrays] | None:
        peer = parts[0].bytes if self.listens else b""
        frames = parts[1:] if self.listens else parts
        now = time.monotonic()
        if peer not in self._assemblies:
            self._forget(now)
            self._assemblies[peer] = now, Assembly(self.limit)
        assembly = self._assemblies[peer][1]
        self._assemblies[peer] = now, assembly
        if len(frames) != 1:
            return None  # what no side of ours sends
        others = sum(one.pending_bytes for _, one in self._assemblies.values())
        try:
            done = assembly.take(frames[0].buffer, elsewhere=others - assembly.pending_bytes)
        except Refused as refused:
            return peer, refused, {}
        return (peer, *done) if done is not None else None

    def _forget(self, now: float) -> None:
        """Make room for another peer."""
        for peer, (seen, _) in sorted(self._assemblies.items(), key=lambda item: item[1][0]):
            if now - seen > IDLE_SECONDS or len(self._assemblies) >= MAX_PEERS:
                del self._assemblies[peer]

    def _note_events(self) -> None:
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._suspect_until = time.monotonic() + _SUSPICION_SECONDS

    def _lost_for_sure(self, peer: bytes) -> bool:
        """Whether the peer is gone, after a connection ended."""
        if not self._suspect_until:
            return False
        if not self.listens:
            return True
        if peer:
            # Which of several connections it was is only told by sending.
            try:
                self._socket.send_multipart([peer, _ANYBODY], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno == errno.EHOSTUNREACH:
                    return True
        if time.monotonic() > self._suspect_until:
            self._suspect_until = 0.0
        return False

    def close(self) -> None:
        """Close the socket; what was not sent is dropped after a moment. Idempotent."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close(linger=200)
            self._monitor.close(linger=0)
            self._context.term()


_ANYBODY = pack(Hello(id=-1), {}, 0)[0]
"""An answer with this id is nobody's: it only shows whether there is a connection."""


class _Only:
    """The one client key that may connect."""

    def __init__(self, allowed: bytes) -> None:
        self._allowed = allowed

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self._allowed
