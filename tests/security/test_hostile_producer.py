# SPDX-License-Identifier: Apache-2.0
"""Producers that lie, against a real consumer's agent.

A fetch from one ends in its own error and leaves nothing; fetches from others go on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zmq

from ec_connector import Consumer
from ec_connector.errors import FetchError, ItemMissingError, RemoteSaveError
from ec_connector.protocol.local import FetchItem, Ready
from ec_connector.protocol.messages import (
    MAX_BODY_BYTES,
    XferAck,
    XferChunk,
    XferDone,
    XferReq,
    XferStatus,
    encode,
)
from ec_connector.testing import FakeProducer
from tests.security.hostile import (
    PATIENCE,
    ROWS,
    SECRET,
    SMALL,
    Lie,
    RawConsumer,
    RawProducer,
    Victim,
    altered,
    attempt,
    grant,
    request,
    sockets,
    until,
)

WANTED = ROWS[:10]
"""What the lying producer announces."""
BYTES = WANTED.tobytes()
TIMEOUT = 0.3


@pytest.fixture(scope="module")
def good() -> Iterator[FakeProducer]:
    """A producer that tells the truth."""
    with FakeProducer(**SMALL) as producer:
        yield producer


@pytest.fixture(scope="module")
def consumer(good: FakeProducer) -> Iterator[Consumer]:
    """Whose agent is lied to."""
    with Consumer(**SMALL) as consumer:
        for number in range(40):  # until its pool has been all used once
            rows = ROWS + np.uint32(number)
            again = consumer.fetch(f"warm {number}", good.put(f"warm {number}", rows), PATIENCE)
            assert (again == rows).all()
        yield consumer


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context[Any]]:
    """The attacker's own."""
    with sockets() as context:
        context.socket(zmq.PAIR).close()  # its threads start with the first
        yield context


@pytest.fixture
def liar(context: zmq.Context[Any]) -> Iterator[RawProducer]:
    """One that answers what each test says."""
    liar = RawProducer(context)
    yield liar
    liar.close()


@pytest.fixture
def victim(consumer: Consumer, good: FakeProducer) -> Iterator[Victim]:
    """The consumer's agent; whole afterwards, and fetching."""
    victim = Victim(consumer)
    yield victim
    announcement = good.put("after", ROWS)
    assert (consumer.fetch("after", announcement, timeout=PATIENCE) == ROWS).all()
    victim.assert_whole()


def chunk(req: XferReq, at: int, size: int, data: bytes, **fields: Any) -> list[bytes]:
    """A run of payload."""
    return [altered(XferChunk(req.session_id, req.xfer_id, at, size), **fields), data]


def of(**fields: Any) -> Lie:
    """A grant with the right bytes behind it, that is otherwise in some fields."""
    return lambda req: [[grant(req, WANTED, **fields), BYTES]]


def nack(req: XferReq, **fields: Any) -> list[bytes]:
    """A refusal that says too much."""
    ack = XferAck(req.mm_hash, XferStatus.NACK_INTERNAL, req.session_id, xfer_id=req.xfer_id)
    return [altered(ack, **fields)]


def here(consumer: Consumer, key: str) -> Ready:
    """What the consumer's own pool has under a key, whoever brought it."""
    with consumer._lock:
        return consumer._ask(FetchItem(key, 1000), 1.0)


HALF = len(BYTES) // 2
REGION = {"pid": os.getpid(), "fd": 0, "nbytes": 1 << 20, "block_bytes": 4096, "token": "00" * 16}
LIES: dict[str, Lie] = {
    # about the item
    "another size": of(nbytes=len(BYTES) - 1),
    "a size beyond all memory": of(nbytes=(1 << 63) - 1),
    "a size beyond 63 bits": of(nbytes=1 << 63),
    "a negative size": of(nbytes=-1),
    "no size": of(nbytes=0),
    "another dtype": of(dtype="float32"),
    "a dtype of noise": of(dtype="\0" * 32),
    "another shape": of(shape=[600, 10]),
    "a shape of more axes": of(shape=[1] * 100),
    "a negative axis": of(shape=[-10, -600]),
    "an axis beyond all memory": of(shape=[1 << 62, 600]),
    "another item": of(mm_hash="another"),
    # about the transfer
    "another session": of(session_id="somebody else's"),
    "no session": of(session_id=""),
    "another number": of(xfer_id=1 << 40),
    "the next number": lambda req: [[grant(req, WANTED, xfer_id=req.xfer_id + 1), BYTES]],
    "an unknown status": of(status=17),
    "an unknown plane": of(plane="carrier pigeon"),
    # payload
    "a payload cut short": lambda req: [[grant(req, WANTED), BYTES[:-1]]],
    "an empty payload": lambda req: [[grant(req, WANTED), b""]],
    "a payload too long": lambda req: [[grant(req, WANTED), BYTES + b"x"]],
    "a payload of two frames": lambda req: [[grant(req, WANTED), BYTES[:HALF], BYTES[HALF:]]],
    "a thousand frames": lambda req: [[grant(req, WANTED), *[b"x"] * 1000]],
    "a frame beyond every chunk": lambda req: [[grant(req, WANTED), bytes(2 << 20)]],
    "chunks before the ack": lambda req: [
        chunk(req, 0, len(BYTES), BYTES),
        nack(req, message="never mind"),
    ],
    "a chunk out of order": lambda req: [
        [grant(req, WANTED)],
        chunk(req, HALF, HALF, BYTES[HALF:]),
        chunk(req, 0, HALF, BYTES[:HALF]),
    ],
    "the same chunk twice": lambda req: [
        [grant(req, WANTED)],
        *[chunk(req, 0, HALF, BYTES[:HALF])] * 2,
    ],
    "a chunk beyond the end": lambda req: [
        [grant(req, WANTED)],
        chunk(req, 0, len(BYTES) + 8, BYTES + bytes(8)),
    ],
    "a chunk that says more than it has": lambda req: [
        [grant(req, WANTED)],
        chunk(req, 0, len(BYTES), BYTES[:HALF]),
    ],
    "a chunk that says less than it has": lambda req: [
        [grant(req, WANTED)],
        chunk(req, 0, HALF, BYTES),
        chunk(req, HALF, HALF, BYTES[HALF:]),
    ],
    "a chunk without bytes": lambda req: [
        [grant(req, WANTED)],
        chunk(req, 0, len(BYTES), BYTES)[:1],
    ],
    "empty chunks": lambda req: [[grant(req, WANTED)], *[chunk(req, 0, 0, b"")] * 100],
    "a chunk at -1": lambda req: [[grant(req, WANTED)], chunk(req, 0, 1, b"x", offset=-1)],
    "a chunk beyond 63 bits": lambda req: [
        [grant(req, WANTED)],
        chunk(req, 0, 1, b"x", offset=(1 << 64) - 1),
    ],
    "chunks of another session": lambda req: [
        [grant(req, WANTED)],
        chunk(req, 0, len(BYTES), BYTES, session_id="somebody else's"),
    ],
    # what is no answer
    "its own request": lambda req: [[encode(req)]],
    "noise": lambda _req: [[os.urandom(500)]],
    "no body": lambda _req: [[]],
    "a body beyond the limit": lambda req: [[grant(req, WANTED) + bytes(MAX_BODY_BYTES)]],
    "a traceback beyond the limit": lambda req: [nack(req, traceback="x" * 60_000)],
    "a message of control characters": lambda req: [nack(req, message="\x1b[2J\r\n" * 100)],
    # about memory
    "memory without a place": of(plane="memory"),
    "a region that is none": of(plane="memory", region=REGION, extents=[[0, 1]], generation=1),
    "a region of the kernel": of(
        plane="memory", region={**REGION, "pid": 1}, extents=[[0, 1]], generation=1
    ),
    "a region of a negative process": of(
        plane="memory", region={**REGION, "pid": -1}, extents=[[0, 1]], generation=1
    ),
    "a region beyond all memory": of(
        plane="memory", region={**REGION, "nbytes": 1 << 62}, extents=[[0, 1 << 50]], generation=1
    ),
    "a region of no blocks": of(
        plane="memory", region={**REGION, "block_bytes": 0}, extents=[[0, 1]], generation=1
    ),
    "negative extents": of(plane="memory", region=REGION, extents=[[-1, 2]], generation=1),
    "many extents": of(plane="memory", region=REGION, extents=[[0, 1]] * 5000, generation=1),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_lies(
    victim: Victim,
    consumer: Consumer,
    liar: RawProducer,
    lie: Lie,
    request: pytest.FixtureRequest,
) -> None:
    """The fetch fails, soon, and nothing of the lie is kept."""
    liar.lie = lie
    key = request.node.name
    delivered = False
    begun = time.monotonic()
    while not liar.heard:
        assert time.monotonic() - begun < PATIENCE, "it was not asked, so nothing is shown"
        with contextlib.suppress(FetchError):
            consumer.fetch(key, liar.announce(WANTED), timeout=TIMEOUT)
            delivered = True
        attempt("lies of a producer", got_in=delivered)
        assert not delivered
    with pytest.raises(ItemMissingError, match="not in this engine's pool"):
        here(consumer, key)


def test_replayed_answers(victim: Victim, consumer: Consumer, liar: RawProducer) -> None:
    """Answers to an earlier question do not answer a later one; repeated ones change nothing."""
    kept: list[list[bytes]] = []

    def first(req: XferReq) -> list[list[bytes]]:
        kept.append([grant(req, WANTED), BYTES])
        return kept * 5

    liar.lie = first
    assert (consumer.fetch("replayed", liar.announce(WANTED), timeout=PATIENCE) == WANTED).all()
    other = WANTED + np.uint32(1)
    liar.lie = lambda _req: kept * 5
    with pytest.raises(FetchError):
        consumer.fetch("replayed again", liar.announce(other), timeout=TIMEOUT)
    with pytest.raises(FetchError):
        consumer.fetch("replayed, the same size", liar.announce(WANTED), timeout=TIMEOUT)
    attempt("replayed answers", times=14)


def test_answers_to_questions_of_others(
    victim: Victim, consumer: Consumer, good: FakeProducer, liar: RawProducer
) -> None:
    """A producer that knows the session and guesses the numbers answers for no other one."""
    truth = ROWS[:1]
    announcement = good.announce("parked", truth)
    lies = truth + np.uint32(9)

    def flood(req: XferReq) -> list[list[bytes]]:
        found = []
        for number in range(1, req.xfer_id + 1):
            theirs = request("parked", req.session_id, xfer_id=number)
            found.append([grant(theirs, lies), lies.tobytes()])
            found.append(chunk(theirs, 0, lies.nbytes, lies.tobytes()))
        attempt("answers to questions of others", times=len(found))
        return [*found, nack(req)]

    liar.lie = flood
    with (
        Consumer(agent=consumer._link.endpoint) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        waits = pool.submit(second.fetch, "parked", announcement, timeout=PATIENCE)
        assert until(lambda: Victim(good).stats()["parked_now"])
        with pytest.raises(RemoteSaveError):
            consumer.fetch("cause of the flood", liar.announce(WANTED), timeout=PATIENCE)
        assert not waits.done(), "answered by the liar"
        good.land("parked")
        assert (waits.result() == truth).all()


# ── memory of others ─────────────────────────────────────────────────────────

SHOWN: dict[str, Callable[[XferAck, XferAck], dict[str, Any]]] = {
    "all but the proof": lambda own, theirs: shown(theirs),
    "no generation": lambda own, theirs: shown(theirs, generation=0),
    "the proof of its own": lambda own, theirs: shown(theirs, proof=own.proof),
    "behind its own": lambda own, theirs: shown(
        own, extents=[*own.extents, *theirs.extents], proof=own.proof
    ),
    "its own, and larger": lambda own, theirs: shown(
        own, extents=[(own.extents[0][0], 4)], proof=own.proof
    ),
}


def shown(ack: XferAck, **fields: Any) -> dict[str, Any]:
    """Where an answer says that bytes are, without its proof."""
    where = {"region": ack.region, "extents": ack.extents, "generation": ack.generation}
    return {"plane": "memory", **where, **fields}


@pytest.mark.parametrize("whose", ["its own", "a producer's"])
@pytest.mark.parametrize("how", SHOWN.values(), ids=SHOWN)
def test_memory_of_others(
    victim: Victim,
    consumer: Consumer,
    good: FakeProducer,
    liar: RawProducer,
    context: zmq.Context[Any],
    whose: str,
    how: Callable[[XferAck, XferAck], dict[str, Any]],
    request: pytest.FixtureRequest,
) -> None:
    """A peer that may have one item does not get others by showing the consumer where they are.

    It learns where a region is from the answer for an item that it knows. The consumer may map
    that region, the peer perhaps not: it must not be talked into reading there for the peer.
    """
    for key, array in (("known", WANTED), ("secret", SECRET)):
        announcement = good.put(key, array)
        assert (consumer.fetch(key, announcement, timeout=PATIENCE) == array).all()
    port = victim.port if whose == "its own" else good.address[1]
    with contextlib.closing(RawConsumer(context, port)) as peer:
        acks = [peer.ask(key, planes=["memory"])[0] for key in ("known", "secret")]
        for key in ("known", "secret"):
            peer.say(XferDone("mallory", key, 1))
    fields = how(*acks)
    liar.lie = lambda req: (
        [[grant(req, SECRET, **fields)]] if "memory" in req.planes else [nack(req)]
    )
    refused = victim.stats().get("memory_plane_refused", 0)
    stolen = False
    with contextlib.suppress(RemoteSaveError):
        consumer.fetch(request.node.name, liar.announce(SECRET), timeout=PATIENCE)
        stolen = True
    attempt("memory of others", got_in=stolen)
    assert not stolen
    assert victim.stats()["memory_plane_refused"] == refused + 1


def test_memory_that_is_its_own_to_show(
    victim: Victim, consumer: Consumer, good: FakeProducer
) -> None:
    """The same way is open to whoever is shown an item by its producer."""
    before = victim.stats()["ready_memory"]
    assert (consumer.fetch("shown", good.put("shown", SECRET), timeout=PATIENCE) == SECRET).all()
    assert victim.stats()["ready_memory"] == before + 1
