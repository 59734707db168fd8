# SPDX-License-Identifier: Apache-2.0
"""Strangers to an agent with keys: however many come, and whatever they send, nothing grows.

They can open connections, begin handshakes and not end them, send what is none, and prove keys
that are not listed. They are closed in time, or at once, and counted; who is listed is served.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from ec_connector import Consumer, Producer
from ec_connector.agent.listen import HANDSHAKE_MS
from ec_connector.curve import load_keys, make_keys
from tests.security.hostile import (
    GREETING,
    PATIENCE,
    ROWS,
    SMALL,
    Victim,
    attempt,
    command,
    dial,
    drained,
    sockets,
    until,
)

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")

MANY = 200
CURVE_GREETING = GREETING.replace(b"NULL\0", b"CURVE")
IN_TIME = HANDSHAKE_MS / 1000 + PATIENCE


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet's keys."""
    directory = tmp_path_factory.mktemp("fleet") / "keys"
    make_keys(directory)
    return directory


@pytest.fixture
def producer(keys: Path) -> Iterator[Producer]:
    """It lets in the fleet's client key alone."""
    with Producer(curve_keys=str(keys), **SMALL) as producer:
        yield producer


class Honest:
    """A listed consumer, which is served all the while."""

    def __init__(self, keys: Path, producer: Producer) -> None:
        self._consumer = Consumer(curve_keys=str(keys), **SMALL)
        self._producer = producer
        self._fetched = 0
        self.fetch()

    def fetch(self) -> None:
        """An item of its own arrives whole."""
        self._fetched += 1
        key = f"item {self._fetched}"
        rows = ROWS + np.uint32(self._fetched)
        got = self._consumer.fetch(key, self._producer.put(key, rows), timeout=PATIENCE)
        assert (got == rows).all()

    def close(self) -> None:
        self._consumer.close()


@pytest.fixture
def honest(keys: Path, producer: Producer) -> Iterator[Honest]:
    honest = Honest(keys, producer)
    yield honest
    honest.close()


def descriptors(victim: Victim) -> int:
    """How many files and sockets the agent has open."""
    return len(os.listdir(f"/proc/{victim.pid}/fd"))


def test_handshakes_that_are_not_ended(producer: Producer, honest: Honest) -> None:
    """Silent ones, and such as stop in the greeting or behind it: closed after the time for it."""
    victim = Victim(producer)
    before = descriptors(victim)
    starts = (b"", CURVE_GREETING[:11], CURVE_GREETING, CURVE_GREETING + command(b"HELLO")[:3])
    waiting = [dial(victim.port) for _ in range(MANY)]
    try:
        for number, connection in enumerate(waiting):
            connection.sendall(starts[number % len(starts)])
        assert until(lambda: descriptors(victim) >= before + MANY)
        honest.fetch()
        assert all(drained(connection, IN_TIME) is not None for connection in waiting)
    finally:
        for connection in waiting:
            connection.close()
    assert until(lambda: descriptors(victim) <= before)
    victim.assert_whole()
    attempt("handshakes of strangers, begun and left", times=MANY)


class Stalled:
    """Between a real CURVE client and the agent: passes on all but the client's last word."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE)
        self.port = self._listener.getsockname()[1]
        self._agent = port
        self.ended = threading.Event()
        self.welcomed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        agent = dial(self._agent)
        with client, agent:
            heard = b""
            for end in (client, agent):
                end.settimeout(0.02)
            while not self.ended.is_set():
                try:
                    data = agent.recv(4096)
                    heard += data
                    client.sendall(data)
                    if not data:
                        self.ended.set()
                except TimeoutError:
                    pass
                except OSError:
                    self.ended.set()
                if b"WELCOME" in heard:
                    self.welcomed.set()
                    continue  # INITIATE, which would prove a key, stays here
                try:
                    agent.sendall(client.recv(4096))
                except TimeoutError:
                    continue

    def close(self) -> None:
        self.ended.set()
        self._thread.join()
        self._listener.close()


def test_right_handshakes_without_their_last_word(
    producer: Producer, honest: Honest, keys: Path
) -> None:
    """The agent has answered with a cookie, and keeps nothing beyond the time for a handshake."""
    victim = Victim(producer)
    before = descriptors(victim)
    server = load_keys(keys).server_public
    public, secret = zmq.curve_keypair()
    stalled = [Stalled(victim.port) for _ in range(20)]
    dealers = []  # a dropped socket warns
    try:
        with sockets() as context:
            for one in stalled:
                dealer: Any = context.socket(zmq.DEALER)
                dealers.append(dealer)
                dealer.linger, dealer.reconnect_ivl = 0, -1
                dealer.curve_serverkey = server
                dealer.curve_publickey, dealer.curve_secretkey = public, secret
                dealer.connect(f"tcp://127.0.0.1:{one.port}")
            assert all(one.welcomed.wait(PATIENCE) for one in stalled)
            honest.fetch()
            assert all(one.ended.wait(IN_TIME) for one in stalled)
    finally:
        for one in stalled:
            one.close()
    assert until(lambda: descriptors(victim) <= before)
    victim.assert_whole()
    attempt("handshakes of strangers, all but the last word", times=len(stalled))


def test_garbage_without_end(producer: Producer, honest: Honest) -> None:
    """Whatever is behind a greeting and no handshake: read no further than it makes sense."""
    victim = Victim(producer)
    before, counted = descriptors(victim), victim.stats()["peers_handshake_failed"]
    noise = np.random.default_rng(5).bytes(1 << 20)
    beginnings = (b"", command(b"HELLO", bytes(194)), b"\x06" + b"\x7f" * 8, b"\x04\xff")
    sent = 0
    for number in range(MANY):
        with dial(victim.port) as connection:
            connection.sendall(CURVE_GREETING + beginnings[number % len(beginnings)])
            try:
                for _ in range(16):
                    sent += connection.send(noise)
            except (ConnectionError, TimeoutError):
                continue
    honest.fetch()
    assert until(lambda: descriptors(victim) <= before)
    assert victim.stats()["peers_handshake_failed"] > counted
    victim.assert_whole()
    attempt("strangers' garbage in place of a handshake", times=MANY)


def test_keys_that_are_not_listed(producer: Producer, honest: Honest, keys: Path) -> None:
    """A key of one's own for each attempt: refused, counted, and forgotten."""
    victim = Victim(producer)
    before = descriptors(victim)
    server = load_keys(keys).server_public
    refused = victim.stats()["peers_key_refused"]
    dealers = []  # a dropped socket warns
    with sockets() as context:
        for _ in range(MANY):
            dealer: Any = context.socket(zmq.DEALER)
            dealers.append(dealer)
            dealer.linger, dealer.sndhwm = 0, 1
            dealer.curve_serverkey = server
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.connect(f"tcp://127.0.0.1:{victim.port}")
        assert until(lambda: victim.stats()["peers_key_refused"] >= refused + MANY, IN_TIME)
        honest.fetch()
    assert until(lambda: descriptors(victim) <= before)
    victim.assert_whole()
    attempt("keys of strangers", times=MANY)
