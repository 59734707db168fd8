# SPDX-License-Identifier: Apache-2.0
"""Hostile peers against real agents of their own processes.

After each attack the agent lives, serves others, holds nothing for anybody and has not grown;
nobody got bytes that he should not have.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from ec_connector import Consumer
from ec_connector.protocol.messages import (
    MAX_BODY_BYTES,
    XferAck,
    XferChunk,
    XferCredit,
    XferDone,
    XferStatus,
    encode,
)
from ec_connector.testing import FakeProducer
from tests.security.hostile import (
    GREETING,
    PATIENCE,
    READY,
    ROWS,
    SMALL,
    RawConsumer,
    Victim,
    altered,
    attempt,
    command,
    dial,
    drained,
    frame,
    prop,
    request,
    shaken,
    sockets,
)

HANDSHAKE = 5.0
"""Seconds after which an agent gives up a handshake."""


@pytest.fixture(scope="module")
def producer() -> Iterator[FakeProducer]:
    """A producer without keys or tickets: whoever reaches the port may ask."""
    with FakeProducer(lease="1s", **SMALL) as producer:
        yield producer


@pytest.fixture(scope="module")
def honest(producer: FakeProducer) -> Iterator[Consumer]:
    """A consumer that wants what it may have."""
    with Consumer(planes=["zmq"], **SMALL) as consumer:
        assert (consumer.fetch("warm", producer.put("warm", ROWS), timeout=PATIENCE) == ROWS).all()
        yield consumer


@pytest.fixture
def victim(producer: FakeProducer, honest: Consumer) -> Iterator[Victim]:
    """The producer's agent; whole afterwards, and serving."""
    producer.put("held", ROWS)
    victim = Victim(producer)
    yield victim
    served(producer, honest)
    victim.assert_whole()


SERVED = iter(range(1 << 30))


def served(producer: FakeProducer, honest: Consumer) -> float:
    """Have the honest consumer fetch something new; the seconds that it took."""
    rows = ROWS + np.uint32(next(SERVED))
    key = f"honest {rows[0, 0]}"
    announcement = producer.put(key, rows)
    begun = time.monotonic()
    assert (honest.fetch(key, announcement, timeout=PATIENCE) == rows).all()
    return time.monotonic() - begun


# ── before anybody has said who he is ────────────────────────────────────────

NOISE = random.Random(5).randbytes(4096)
GARBAGE = {
    "noise": NOISE,
    "noise that begins as ZMTP": GREETING[:10] + NOISE,
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    "TLS": bytes.fromhex("16030100c8010000c40303") + NOISE[:200],
    "all ones": b"\xff" * 4096,
    "an old ZMTP": b"\x01\x00" * 100,
    "another mechanism": GREETING.replace(b"NULL", b"GSSAPI"[:4]) + NOISE,
    "noise after the greeting": GREETING + NOISE,
    "zeros after the greeting": GREETING + bytes(4096),
    "READY cut short": GREETING + READY[:-3] + NOISE,
    "READY without a socket type": GREETING + command(b"READY") + NOISE,
    "READY of a PUB socket": GREETING + command(b"READY", prop(b"Socket-Type", b"PUB")),
    "a property beyond its command": GREETING
    + command(b"READY", b"\x0bSocket-Type\xff\xff\xff\xff"),
    "a command of 4 GiB": GREETING + b"\x06" + (1 << 32).to_bytes(8) + NOISE,
    "a command of 2**63 bytes": GREETING + b"\x06" + (1 << 63).to_bytes(8) + NOISE,
    "a message before READY": GREETING + frame(b"hello"),
    "a PING before READY": GREETING + command(b"PING", b"\0\0"),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_instead_of_a_handshake(victim: Victim, garbage: bytes) -> None:
    """The connection ends by itself, at once or with the handshake's time."""
    whole, pieces, left = (dial(victim.port) for _ in range(3))
    with whole, pieces, left:
        whole.sendall(garbage)
        try:
            for at in range(len(garbage[:200])):
                pieces.sendall(garbage[at : at + 1])
        except ConnectionError:
            pass  # it had enough of it
        left.sendall(garbage)
    attempt("garbage before the handshake", times=3)


AFTER = {
    "noise": NOISE,
    "a body of noise": frame(b"", more=True) + frame(NOISE),
    "an empty message": frame(b""),
    "a thousand frames": frame(b"x", more=True) * 1000 + frame(b"x"),
    "a frame just too large": frame(b"", more=True) + frame(bytes(MAX_BODY_BYTES + 65)),
    "a frame that says 1 GiB": frame(b"", more=True) + frame(NOISE, declared=1 << 30),
    "a frame that says 2**63 - 1": frame(b"", more=True) + frame(NOISE, declared=(1 << 63) - 1),
    "a frame that says 2**64 - 1": frame(b"", more=True) + frame(NOISE, declared=(1 << 64) - 1),
    "a short frame cut off": b"\x00\xff" + NOISE[:10],
    "reserved flags": b"\xf8\x04abcd",
    "a command of an unknown name": command(b"SHUTDOWN", NOISE[:100]),
    "a second READY": READY + READY,
    "an ERROR command": command(b"ERROR", b"\x05sorry"),
    "many PINGs": command(b"PING", b"\0\0" + NOISE[:16]) * 1000,
    "a SUBSCRIBE": command(b"SUBSCRIBE", b"a"),
}


@pytest.mark.parametrize("garbage", AFTER.values(), ids=AFTER)
def test_garbage_after_a_handshake(victim: Victim, garbage: bytes) -> None:
    """No request comes of it, and no buffer of the size that it says."""
    before = victim.stats().get("requests", 0)
    for _ in range(3):
        with shaken(victim.port) as connection:
            try:
                connection.sendall(garbage)
                connection.settimeout(0.05)
                connection.recv(4096)
            except (ConnectionError, TimeoutError):
                continue
    attempt("garbage after the handshake", times=3)
    assert victim.stats().get("requests", 0) == before


@pytest.mark.timeout(60)
def test_slow_loris(victim: Victim, producer: FakeProducer, honest: Consumer) -> None:
    """Half-open handshakes by the hundred end after 5 s; others are served meanwhile."""
    begun = time.monotonic()
    says = [b"", GREETING[:1], GREETING[:12], GREETING, GREETING + READY[:5]]
    connections = [dial(victim.port) for _ in range(200)]
    try:
        for number, connection in enumerate(connections):
            connection.sendall(says[number % len(says)])
        while time.monotonic() - begun < HANDSHAKE - 1:
            assert served(producer, honest) < 1.0
            for number, connection in enumerate(connections):
                if number % len(says) == 0:  # a byte at a time does not help
                    connection.sendall(GREETING[:1])
            time.sleep(0.5)
        left = sum(
            drained(connection, max(begun + HANDSHAKE + 3 - time.monotonic(), 0.01)) is None
            for connection in connections
        )
    finally:
        for connection in connections:
            connection.close()
    attempt("half-open handshakes", times=len(connections))
    assert not left, f"{left} connections still stand after {time.monotonic() - begun:.1f} s"


# ── requests that are none ───────────────────────────────────────────────────

REQ = encode(request("held"))
MISSHAPEN: dict[str, list[bytes]] = {
    "one frame": [REQ],
    "no delimiter": [b"x", REQ],
    "a payload": [b"", REQ, b"payload"],
    "a thousand frames": [b""] * 1000,
    "no body": [b"", b""],
    "noise": [b"", NOISE],
    "text": [b"", b"hello"],
    "an ack": [b"", encode(XferAck("held", XferStatus.OK))],
    "a chunk": [b"", encode(XferChunk("s", 1, 0, 10))],
    "no type": [b"", msgspec.msgpack.encode({"mm_hash": "held", "compatibility_hash": ""})],
    "an unknown type": [b"", altered(request("held"), type="steal")],
    "a list": [b"", msgspec.msgpack.encode(["req", "held", ""])],
    "cut off": [b"", REQ[:-5]],
    "doubled": [b"", REQ + REQ],
    "a deep nest": [b"", b"\x91" * 60_000],
    "a map that says 2**32 - 1": [b"", b"\xdf\xff\xff\xff\xff"],
    "a text that says 2**32 - 1": [b"", b"\x81\xa7mm_hash\xdb\xff\xff\xff\xff"],
    "an array that says 2**32 - 1": [b"", b"\x81\xa6planes\xdd\xff\xff\xff\xff"],
    "a long name": [b"", altered(request("held"), mm_hash="x" * 513)],
    "a long session": [b"", altered(request("held"), session_id="x" * 513)],
    "a long ticket": [b"", altered(request("held"), ticket="x" * 65)],
    "many planes": [b"", altered(request("held"), planes=["zmq"] * 33)],
    "a long plane": [b"", altered(request("held"), planes=["x" * 60_000])],
    "many factors": [b"", altered(request("held"), fingerprint={str(n): "" for n in range(33)})],
    "a long factor": [b"", altered(request("held"), fingerprint={"model": "x" * 60_000})],
    "a factor's long name": [b"", altered(request("held"), fingerprint={"x" * 60_000: "y"})],
    "negative credit": [b"", altered(request("held"), credit_bytes=-1)],
    "credit beyond 64 bits": [b"", altered(request("held"), credit_bytes=1 << 63)],
    "negative time": [b"", altered(request("held"), timeout_ms=-1)],
    "a number as a name": [b"", altered(request("held"), mm_hash=7)],
    "not UTF-8": [b"", REQ.replace(b"held", b"\xff\xfe\xff\xfe")],
}


@pytest.mark.parametrize("frames", MISSHAPEN.values(), ids=MISSHAPEN)
def test_requests_that_are_none(victim: Victim, frames: list[bytes]) -> None:
    """Dropped without an answer, and counted; a right one on the same connection is answered."""
    dropped = victim.stats()["frames_dropped"]
    with sockets() as context:
        peer = RawConsumer(context, victim.port)
        for _ in range(5):
            peer.socket.send_multipart(frames)
        ack, *payload = peer.ask("nobody has this")
        assert ack.status is XferStatus.NACK_MISSING, "one of them was answered"
        assert not payload
        attempt("messages that are none", times=5)
    assert victim.stats()["frames_dropped"] - dropped == 5


# ── right words in the wrong order, and about others ─────────────────────────


def test_words_out_of_order(victim: Victim) -> None:
    """Credit and done before any request, twice, and for what is over."""
    with sockets() as context:
        peer = RawConsumer(context, victim.port)
        for xfer_id in (0, 1, 2, (1 << 63) - 1):
            peer.say(XferCredit("mallory", "held", xfer_id, (1 << 63) - 1))
            peer.say(XferDone("mallory", "held", xfer_id))
        assert peer.ask("held", credit_bytes=1)[0].status is XferStatus.OK
        peer.say(XferDone("mallory", "held", 1))
        for _ in range(3):
            peer.say(XferDone("mallory", "held", 1))
            peer.say(XferCredit("mallory", "held", 1, 1 << 20))
        ack = peer.ask("held", xfer_id=2, credit_bytes=1)
        assert isinstance(ack[0], XferAck), "something was sent for a grant that had ended"
        peer.say(XferDone("mallory", "held", 2))
        attempt("words out of order", times=15)


def test_words_about_a_transfer_of_somebody_else(victim: Victim, producer: FakeProducer) -> None:
    """Who knows session, item and number of another's grant neither feeds, ends nor gets it."""
    producer.put("large", SECRET_ROWS)
    with sockets() as context:
        owner = RawConsumer(context, victim.port)
        thief = RawConsumer(context, victim.port)
        ack = owner.ask("large", "alice", credit_bytes=1 << 16, xfer_id=5)
        assert ack[0].status is XferStatus.OK
        first = owner.answer()
        assert len(first[1]) == 1 << 16
        for _ in range(10):
            thief.say(XferCredit("alice", "large", 5, 1 << 20))
            thief.say(XferDone("alice", "large", 5))
        assert thief.ask("nobody has this")[0].status is XferStatus.NACK_MISSING
        got_in = bool(thief.answer(0.2))
        assert not owner.answer(0.2), "fed by somebody else"
        assert victim.stats()["grants"] == 1, "ended by somebody else"
        owner.say(XferCredit("alice", "large", 5, 1 << 16))
        assert owner.answer()[0].offset == 1 << 16
        owner.say(XferDone("alice", "large", 5))
        attempt("words about somebody else's transfer", times=20, got_in=got_in)


SECRET_ROWS = np.arange(250_000, dtype=np.uint32)


def test_credit_without_end(victim: Victim, producer: FakeProducer) -> None:
    """No more than the item is sent, however much is allowed, and nothing after its end."""
    producer.put("large", SECRET_ROWS)
    with sockets() as context:
        peer = RawConsumer(context, victim.port)
        answers = [peer.ask("large", credit_bytes=0, chunk_bytes=1)]
        for _ in range(50):
            peer.say(XferCredit("mallory", "large", 1, (1 << 63) - 1))
        while answers[-1]:
            answers.append(peer.answer(0.5))
        payload = b"".join(part for answer in answers for part in answer[1:])
        assert payload == SECRET_ROWS.tobytes()
        peer.say(XferDone("mallory", "large", 1))
        attempt("credit without end", times=50)


def test_asked_for_and_left(victim: Victim, producer: FakeProducer) -> None:
    """Peers that ask, take a grant each and go without a word keep nothing beyond the lease."""
    producer.put("large", SECRET_ROWS)
    for number in range(20):
        with sockets() as context:
            peer = RawConsumer(context, victim.port)
            assert peer.ask("large", f"session {number}", credit_bytes=1)[0].status == 0
    attempt("grants taken and left", times=20)
    assert victim.stats()["grants"] > 0, "nothing was left, so nothing is shown"
