# SPDX-License-Identifier: Apache-2.0
"""Bytes as a walk of both state machines, with a hostile network between them.

As in ``tests/property/test_pair.py``, and besides: strangers and the peers themselves say what
they should not. After each step both machines and both pools are valid; at the end, when the
network is well and the time is over, nobody holds anything.
"""

from __future__ import annotations

import contextlib

from ec_connector.protocol.connections import PEER_IDLE_SECONDS
from ec_connector.protocol.effects import Span
from ec_connector.protocol.local import Failed, Ready
from ec_connector.protocol.messages import (
    RegionRef,
    ToConsumer,
    ToProducer,
    XferAck,
    XferChunk,
    XferCredit,
    XferDone,
    XferPing,
    XferReq,
    XferStatus,
)
from ec_connector.testing import Pair
from ec_connector.testing.wiring import PRODUCER

BLOCKS, BLOCK, CHUNK = 12, 1024, 4096
SIZES = {"a": 10, "b": BLOCK, "c": 3000, "d": 5000, "e": 9500}
CLIENTS = [b"one", b"two", b"three"]
STEPS = 80
"""A longer walk finds nothing that a shorter one would not, and takes its time."""


class Choices:
    """Decisions, one byte each; all are 0 when the bytes are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)
        self.left = len(data)

    def number(self, below: int) -> int:
        """From 0 on."""
        self.left -= 1
        return next(self._data, 0) % below

    def of(self, *what):  # type: ignore[no-untyped-def]
        """One of these."""
        return what[self.number(len(what))]


class Walk:
    """A pair, and what a walk does to it."""

    def __init__(self, choose: Choices) -> None:
        self.choose = choose
        planes = choose.of(("zmq",), ("memory", "zmq"))
        self.pair = Pair(
            blocks=BLOCKS,
            block_bytes=BLOCK,
            planes=planes,
            chunk_bytes=CHUNK,
            window_bytes=2 * CHUNK,
            max_parked=4,
            lease=2.0,
        )
        self.steps = 0

    def step(self) -> None:
        """One thing happens."""
        self.steps += 1
        self.choose.of(
            self.save, self.reserve, self.fail, self.step_done, self.fetch, self.fetch,
            self.release, self.pair.run, self.pair._turn, self.time, self.meddle, self.network,
            self.drop_all, self.say_to_producer, self.say_to_consumer, self.client_ends,
        )()  # fmt: skip
        self.pair.validate()

    def key(self) -> str:
        return str(self.choose.of(*SIZES))

    def save(self) -> None:
        key = self.key()
        with contextlib.suppress(ValueError):
            self.pair.save(key, bytes([self.choose.number(256)]) * SIZES[key])

    def reserve(self) -> None:
        key = self.key()
        self.pair.reserve(key, SIZES[key], step=self.steps, replace=self.choose.of(False, True))

    def fail(self) -> None:
        with contextlib.suppress(KeyError):
            self.pair.fail(self.key(), "broken")

    def step_done(self) -> None:
        self.pair.step_done(self.steps)

    def fetch(self) -> None:
        key = self.key()
        nbytes = SIZES[key] + self.choose.of(0, 0, 0, 1)
        self.pair.fetch(key, nbytes, self.choose.of(*CLIENTS), timeout=3.0)

    def release(self) -> None:
        self.pair.release(self.key(), self.choose.of(*CLIENTS))

    def client_ends(self) -> None:
        client = self.choose.of(*CLIENTS)
        self.pair._do(self.pair.consumer.client_gone(client, self.pair.clock.now))

    def time(self) -> None:
        seconds = self.choose.of(0.01, 0.3, 2.1, 40.0)
        if self.choose.of(True, False):
            self.pair.advance(seconds)
        else:
            self.pair.clock.advance(seconds)
            self.pair._tick()

    def meddle(self) -> None:
        channel = self.choose.of(self.pair.transport.to_consumer, self.pair.transport.to_producer)
        if len(channel):
            at = self.choose.number(len(channel))
            self.choose.of(channel.drop, channel.duplicate, channel.reorder)(at)

    def network(self) -> None:
        self.choose.of(self.pair.partition, self.pair.heal)()
        self.pair.hold_copies = self.choose.of(False, True)
        self.pair.can_map = self.choose.of(True, False)

    def drop_all(self) -> None:
        if self.choose.of(True, False):
            self.pair.consumer_pool.drop_all()
            self.pair._do(self.pair.consumer.drop_all())
        else:
            self.pair.producer_pool.drop_all()
            self.pair._do(self.pair.producer.drop_all())

    # ── what nobody should say ───────────────────────────────────────────────

    def say_to_producer(self) -> None:
        choose, now = self.choose, self.pair.clock.now
        peer = choose.of(self.pair._peer, b"stranger")
        session, key = choose.of("consumer", "other", ""), choose.of(*SIZES, "none")
        xfer_id, count = choose.number(32), choose.of(0, 1, CHUNK, (1 << 63) - 1)
        message: ToProducer = choose.of(
            XferReq(
                key, "", session, choose.of(1, 1, 1, 2), xfer_id,
                planes=choose.of([], ["zmq"], ["memory", "zmq"], ["x"]), credit_bytes=count,
                chunk_bytes=choose.of(0, CHUNK, (1 << 63) - 1), timeout_ms=count,
            ),
            XferCredit(session, key, xfer_id, count),
            XferDone(session, key, xfer_id),
            XferPing(xfer_id),
        )  # fmt: skip
        machine = self.pair.producer
        if isinstance(message, XferReq):
            self.pair._do(machine.asked(peer, message, now))
        elif isinstance(message, XferCredit):
            self.pair._do(machine.credited(peer, message, now))
        elif isinstance(message, XferPing):
            self.pair._do(machine.pinged(peer, message))
        else:
            self.pair._do(machine.done(peer, message))

    def say_to_consumer(self) -> None:
        choose, machine, now = self.choose, self.pair.consumer, self.pair.clock.now
        key, xfer_id = self.key(), choose.number(64)
        session = choose.of("consumer", "other")
        nbytes = SIZES[key] + choose.of(0, 0, 1, -1)
        ack = XferAck(key, choose.of(*XferStatus), session, xfer_id=xfer_id)
        ack.plane = choose.of("zmq", "memory", "", "x")
        ack.nbytes, ack.dtype, ack.shape = nbytes, choose.of("uint8", "int8"), [nbytes]
        ack.extents = [(choose.number(BLOCKS), choose.number(BLOCKS))]
        ack.generation = choose.number(8)
        if choose.of(True, False):
            ack.region = RegionRef(1, 1, BLOCKS * BLOCK, BLOCK, "00")
        chunk = XferChunk(session, xfer_id, choose.of(0, 0, CHUNK, 1), choose.of(CHUNK, 10, 0))
        message: ToConsumer = choose.of(ack, chunk)
        came: int | None = None
        if choose.of(True, False):
            place = machine.landing(PRODUCER, message)
            came = place.nbytes if isinstance(place, Span) and choose.of(True, False) else 0
        if isinstance(message, XferAck):
            self.pair._do(machine.answered(PRODUCER, message, came, now))
        else:
            self.pair._do(machine.arrived(PRODUCER, message, came, now))

    def end(self) -> None:
        """All is well, all wait for what is due, and everybody lets go."""
        pair = self.pair
        pair.hold_copies = False
        pair.heal()
        pair.step_done(self.steps)
        pair.advance(3 * PEER_IDLE_SECONDS)
        asked = {(client, key) for client in CLIENTS for key in SIZES}
        for client, key in sorted(asked):
            pair.release(key, client)
        pair.advance(3 * PEER_IDLE_SECONDS)
        pair.validate()
        for pool in (pair.producer_pool, pair.consumer_pool):
            usage = pool.usage()
            assert (usage.pinned, usage.saving) == (0, 0), usage
        assert pair.producer.gauges() == {"grants": 0, "parked_now": 0}
        assert pair.consumer.gauges() == {"fetching": 0, "waiting_for_room": 0, "peers": 0}
        assert all(isinstance(message, Ready | Failed) for _, message in pair.answers)


def walk(data: bytes) -> None:
    """The target."""
    choose = Choices(data)
    it = Walk(choose)
    while choose.left > 0 and it.steps < STEPS:
        it.step()
    it.end()
