# SPDX-License-Identifier: Apache-2.0
"""What hostile peers are made of: raw TCP, raw ZMTP, raw ZMQ, and a look at their victim."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from ec_connector import Consumer, Producer
from ec_connector.protocol.local import AskStats, Stats
from ec_connector.protocol.messages import (
    ToConsumer,
    ToProducer,
    XferAck,
    XferReq,
    XferStatus,
    decode_to_consumer,
    decode_to_producer,
    encode,
)

TRIED: list[tuple[str, int, int]] = []
"""What the test that runs has attempted: the kind, how often, and how many got in."""

SMALL: dict[str, Any] = {"pool_size": "8MiB", "connect_timeout": "1s"}
PATIENCE = 10.0
SOON = 2.0
"""Seconds in which a fetch that only waits for lies is given up."""
GROWTH = 8 * 1024
"""KiB by which an agent may be larger after an attack."""

ROWS = np.arange(60_000, dtype=np.uint32).reshape(100, 600)
SECRET = np.random.default_rng(7).integers(0, 256, 200_000, dtype=np.uint8)
"""What an attacker is after."""


def attempt(kind: str, *, got_in: bool = False, times: int = 1) -> None:
    """Count attempts for the summary."""
    TRIED.append((kind, times, times if got_in else 0))


def until(what: Callable[[], Any], seconds: float = PATIENCE) -> bool:
    """Wait for something to hold."""
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(what())


# ── the victim ───────────────────────────────────────────────────────────────


class Victim:
    """An agent under attack, seen through its owner's connection."""

    def __init__(self, member: Producer | Consumer) -> None:
        self.member = member
        self.pid = member.agent_pid
        self._asked = 1 << 20
        self.begun_with = self.memory()

    @property
    def port(self) -> int:
        """Where it serves peers."""
        return self.member.address[1]

    def stats(self) -> dict[str, Any]:
        """What it counts."""
        self._asked += 1
        seq = self._asked
        with self.member._lock:
            assert self.member._link.send(AskStats(seq))
            answer = self.member._answer(lambda a: isinstance(a, Stats) and a.seq == seq, PATIENCE)
        assert isinstance(answer, Stats), "the agent does not answer"
        return answer.values

    def memory(self) -> int:
        """KiB that the process holds for itself, without the pool."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"RssAnon:\s+(\d+)", status)[0])

    def assert_whole(self, growth: int = GROWTH) -> None:
        """It lives, holds nothing for anybody, and has not grown by more (KiB)."""
        assert self.member.agent_pid == self.pid, "the agent was lost"

        def at_rest() -> bool:
            stats = self.stats()
            held = (stats["blocks_pinned"], stats["grants"], stats["parked_now"], stats["fetching"])
            return held == (0, 0, 0, 0)

        assert until(at_rest), self.stats()
        grown = self.memory() - self.begun_with
        assert grown < growth, f"grown by {grown} KiB"


# ── raw TCP ──────────────────────────────────────────────────────────────────

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.1: signature, version, mechanism, as-server, filler."""


def command(name: bytes, data: bytes = b"") -> bytes:
    """A short ZMTP command frame."""
    body = bytes([len(name)]) + name + data
    return bytes([4, len(body)]) + body


def frame(data: bytes, *, more: bool = False, declared: int | None = None) -> bytes:
    """A long ZMTP message frame, which can say another length than it has."""
    length = len(data) if declared is None else declared
    return bytes([2 | more]) + struct.pack(">Q", length) + data


def prop(name: bytes, value: bytes) -> bytes:
    """A property of the READY command."""
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


READY = command(b"READY", prop(b"Socket-Type", b"DEALER"))


def dial(port: int) -> socket.socket:
    """A TCP connection to an agent."""
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def drained(connection: socket.socket, seconds: float) -> bytes | None:
    """What comes until the other end closes; None if it does not within that time."""
    end = time.monotonic() + seconds
    found = b""
    while (left := end - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            data = connection.recv(65536)
        except TimeoutError:
            return None
        except ConnectionError:
            return found
        if not data:
            return found
        found += data
    return None


def shaken(port: int) -> socket.socket:
    """A raw connection that has done the handshake by hand."""
    connection = dial(port)
    connection.sendall(GREETING + READY)
    found = b""
    while b"Socket-Type" not in found:
        data = connection.recv(4096)
        assert data, "closed during the handshake"
        found += data
    return connection


# ── raw ZMQ ──────────────────────────────────────────────────────────────────


class RawConsumer:
    """A DEALER that says to a producer what it likes."""

    def __init__(self, context: zmq.Context[Any], port: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = 0
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def say(self, message: ToProducer) -> None:
        """Send a message as it should be sent."""
        self.socket.send_multipart([b"", encode(message)])

    def ask(self, key: str, session: str = "mallory", **fields: Any) -> list[Any]:
        """Ask for an item; the answer and what is behind it."""
        self.say(request(key, session, **fields))
        return self.answer()

    def answer(self, seconds: float = PATIENCE) -> list[Any]:
        """The next message and its payloads; nothing when nothing comes."""
        if not self.socket.poll(int(seconds * 1000)):
            return []
        _, body, *payload = self.socket.recv_multipart()
        return [decode_to_consumer(body), *payload]


def request(key: str, session: str = "mallory", **fields: Any) -> XferReq:
    """A request of a peer that knows the zmq plane."""
    known = {"planes": ["zmq"], "credit_bytes": 1 << 20, "chunk_bytes": 1 << 16, "xfer_id": 1}
    return XferReq(key, "", session, **{**known, "timeout_ms": 1000, **fields})


Lie = Callable[[XferReq], Sequence[list[bytes]]]
"""What a hostile producer sends for a request: bodies, each with its payload frames."""


class RawProducer:
    """A ROUTER that answers each request with lies, in a thread of its own."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.lie: Lie = lambda _req: []
        self.heard: list[ToProducer] = []
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = 0
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ending.is_set():
            if not self._socket.poll(20):
                continue
            peer, _, body = self._socket.recv_multipart()
            message = decode_to_producer(body)
            self.heard.append(message)
            for frames in self.lie(message) if isinstance(message, XferReq) else ():
                self._socket.send_multipart([peer, b"", *frames])

    def announce(self, array: np.ndarray[Any, Any]) -> dict[str, Any]:
        """The announcement of an item that it does not have."""
        return {
            "peer_host": "127.0.0.1",
            "peer_port": self.port,
            "size_bytes": array.nbytes,
            "shape": list(array.shape),
            "dtype": str(array.dtype),
        }

    def close(self) -> None:
        """End the thread and the socket."""
        self._ending.set()
        self._thread.join()
        self._socket.close(linger=0)


def grant(req: XferReq, array: np.ndarray[Any, Any], **fields: Any) -> bytes:
    """The body of an ack that grants what was asked for, but for these fields."""
    ack = XferAck(req.mm_hash, XferStatus.OK, req.session_id, xfer_id=req.xfer_id, plane="zmq")
    ack.nbytes, ack.dtype, ack.shape = array.nbytes, str(array.dtype), list(array.shape)
    # By hand: some of the lies are no values that a field could have.
    return altered(ack, **fields)


def altered(message: ToConsumer | ToProducer, /, **fields: Any) -> bytes:
    """The body of a message in which some fields have other values."""
    plain = msgspec.msgpack.decode(encode(message))
    return msgspec.msgpack.encode({**plain, **fields})


@contextlib.contextmanager
def sockets() -> Iterator[zmq.Context[Any]]:
    """A context of the attacker's own."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)
