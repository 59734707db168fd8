# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine's processes and their agent: a local socket, and no thread.

Between agents ZMQ carries the messages. Here each one would pass through two of its threads
more: a round trip then takes some 100 us instead of 10, and two of them are in every fetch.

A message is its length (4 bytes, little-endian) and its bytes.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from typing import Final

from ec_connector.errors import AgentStartError
from ec_connector.protocol.local import MAX_LOCAL_BYTES

MAX_QUEUED_BYTES: Final = 64 * 1024 * 1024
"""Held for a reader that does not read."""
_READ_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")
_SCHEME = "ipc://"
NAME_PREFIX: Final = "@ec-connector-"
"""Of the names under which agents listen for processes of their host."""


class Channel:
    """One end of a connection. Never waits.

    Args:
        connected: a connected stream socket. The channel closes it.

    Attributes:
        fd: the descriptor, to wait on.
        ended: nothing can be sent or received any more; :meth:`close` is due.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._unsent = bytearray()
        self._partial = bytearray()
        self.fd = connected.fileno()
        self.ended = False

    @property
    def unsent(self) -> int:
        """Bytes that :meth:`flush` must send when the other end reads."""
        return len(self._unsent)

    def send(self, message: bytes) -> bool:
        """Send a message or queue it. False when it cannot be: ended, too long, or too much."""
        if self.ended or len(message) > MAX_LOCAL_BYTES:
            return False
        if len(self._unsent) + len(message) > MAX_QUEUED_BYTES:
            return False
        self._unsent += _LENGTH.pack(len(message))
        self._unsent += message
        self.flush()
        return not self.ended

    def flush(self) -> None:
        """Send what is queued, as far as the other end takes it now."""
        while self._unsent and not self.ended:
            try:
                sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                return
            del self._unsent[:sent]

    def receive(self) -> list[bytes]:
        """The whole messages that are here, some 64 KiB of them at most, or one longer one."""
        try:
            data = b"" if self.ended else self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended = True
            return []
        self._partial += data
        return self._take_whole()

    def close(self) -> None:
        """End it. Idempotent; what is unsent is lost."""
        self.ended = True
        self._unsent.clear()
        self._socket.close()

    def _take_whole(self) -> list[bytes]:
        messages: list[bytes] = []
        begin, end = 0, len(self._partial)
        while end - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._partial, begin)
            if length > MAX_LOCAL_BYTES:
                self.ended = True  # not one of ours: where would the next message begin?
                break
            after = begin + _LENGTH.size + length
            if after > end:
                break
            messages.append(bytes(self._partial[begin + _LENGTH.size : after]))
            begin = after
        del self._partial[:begin]
        return messages


def listen() -> tuple[socket.socket, str]:
    """A listening socket for this user's processes on this host, and its endpoint.

    The name lives in the kernel only, so nothing is left on a disk however the
    agent ends, and it is random, so nobody can take it first.

    Raises:
        AgentStartError: the kernel refuses.
    """
    name = f"{NAME_PREFIX}{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(name))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise AgentStartError(f"cannot listen for the engine on {name}: {error}") from error
    listener.setblocking(False)
    return listener, f"{_SCHEME}{name}"


def accept(listener: socket.socket) -> Channel | None:
    """The next connection, or None: there is none, or it is another user's and was ended."""
    try:
        connected, _ = listener.accept()
    except OSError:
        return None
    if not _same_user(connected):
        connected.close()
        return None
    return Channel(connected)


def connect(endpoint: str) -> Channel:
    """A channel to the agent that listens there.

    Raises:
        OSError: nobody does, or somebody of another user.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(_address(endpoint.removeprefix(_SCHEME)))
        if not _same_user(connected):
            raise PermissionError("it belongs to another user")
    except OSError:
        connected.close()
        raise
    return Channel(connected)


def _address(name: str) -> str:
    return "\0" + name[1:] if name.startswith("@") else name


def _same_user(connected: socket.socket) -> bool:
    """Whether the process at the other end, as the kernel knows it, is of this user."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack(
        "3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return bool(uid == os.getuid())
