# SPDX-License-Identifier: Apache-2.0
"""Carries out what two state machines want done, with lists where an agent has sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from ec_connector.codecs.choice import NONE
from ec_connector.codecs.work import pack, unpack
from ec_connector.errors import CodecError, InternalError
from ec_connector.pool.blocks import BlockPool
from ec_connector.protocol.account import Account
from ec_connector.protocol.consumer import ConsumerMachine
from ec_connector.protocol.effects import (
    Address,
    Book,
    Connect,
    CopyFromPeer,
    Disconnect,
    Effect,
    EndGrant,
    SendToConsumer,
    SendToProducer,
    Span,
    StopCopy,
    Tell,
    Unpack,
)
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import ToClient
from ec_connector.protocol.messages import (
    RegionRef,
    XferAck,
    XferChunk,
    XferCredit,
    XferPing,
    XferPong,
    XferReq,
    decode_to_consumer,
    decode_to_producer,
    encode,
)
from ec_connector.protocol.producer import ProducerMachine
from ec_connector.protocol.saves import SaveDesk
from ec_connector.testing.clock import ManualClock
from ec_connector.testing.memory import PlainMemory
from ec_connector.testing.transport import Transport

PRODUCER = Address("producer", 1)
TOO_MANY_TURNS = 100_000


@dataclass(frozen=True, slots=True)
class Frame:
    """One message on its way: its encoded body, and what lies behind it.

    ``packed`` is a payload of its own, ``payload`` one that is read when it arrives.
    """

    peer: bytes
    body: bytes
    payload: Span | None = None
    grant: str = ""
    packed: bytes | None = None


@dataclass(slots=True)
class _Copy:
    effect: CopyFromPeer
    done: int = 0


class Wiring:
    """Two machines, their pools and memory, and the transport between them."""

    def __init__(
        self,
        *,
        blocks: int = 16,
        block_bytes: int = 1024,
        planes: tuple[str, ...] = ("zmq",),
        producer_identity: Identity | None = None,
        consumer_identity: Identity | None = None,
        chunk_bytes: int = 4096,
        window_bytes: int = 8192,
        connect_timeout: float = 2.0,
        max_peers: int = 4,
        lease: float = 30.0,
        max_parked: int = 64,
        producer_codecs: tuple[str, ...] = (NONE,),
        consumer_codecs: tuple[str, ...] = (NONE,),
    ) -> None:
        self.clock = ManualClock()
        self.transport: Transport[Frame] = Transport(self.clock)
        self.producer_pool = BlockPool(blocks, block_bytes)
        self.consumer_pool = BlockPool(blocks, block_bytes)
        self._there = PlainMemory(self.producer_pool)
        self._here = PlainMemory(self.consumer_pool)
        self.desk = SaveDesk(self.producer_pool)
        self.producer = ProducerMachine(
            self.producer_pool,
            producer_identity or Identity(),
            RegionRef(1, 1, blocks * block_bytes, block_bytes, "00"),
            planes=planes,
            lease=lease,
            max_parked=max_parked,
            codecs=producer_codecs,
        )
        self.consumer = ConsumerMachine(
            self.consumer_pool,
            consumer_identity or Identity(),
            "consumer",
            planes=planes,
            chunk_bytes=chunk_bytes,
            window_bytes=window_bytes,
            connect_timeout=connect_timeout,
            max_peers=max_peers,
            codecs=consumer_codecs,
        )
        self.answers: list[tuple[bytes, ToClient]] = []
        self.hold_copies = False
        self.can_map = True
        self._copies: list[_Copy] = []
        self._faults: list[tuple[int, str]] = []
        self._unpacks: list[Unpack] = []
        self._cut = False
        self._dialled = False
        self._connections = 0
        self._unsent: list[bytes] = []
        self._changes: deque[tuple[Address, bool]] = deque()
        self._ending: dict[str, EndGrant] = {}
        self.served: list[Account] = []
        self.fetched: list[Account] = []
        self.pongs: list[XferPong] = []

    def run(self) -> None:
        """Deliver what can be delivered now, until nothing moves any more."""
        for _ in range(TOO_MANY_TURNS):
            if not self._turn():
                return
        raise InternalError("the machines talk without end")

    def _turn(self) -> bool:
        now = self.clock.now
        moved = True
        if self._changes:
            self._change(*self._changes.popleft())
        elif (frame := self.transport.to_producer.take()) is not None:
            self._at_producer(frame)
        elif (frame := self.transport.to_consumer.take()) is not None:
            self._at_consumer(frame)
        elif self._faults:
            xfer_id, fault = self._faults.pop(0)
            self._do(self.consumer.copied(xfer_id, fault, now))
        elif self._copies and not self.hold_copies:
            self._finish(self._copies.pop(0))
        elif self._unpacks and not self.hold_copies:
            self._unpack(self._unpacks.pop(0))
        else:
            moved = False
        self._sweep()
        self._do(self.consumer.room(now))
        return moved

    def _tick(self) -> None:
        self._do(self.producer.tick(self.clock.now))
        self._do(self.consumer.tick(self.clock.now))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Tell):
                self.answers.append((effect.client, effect.message))
            elif isinstance(effect, SendToConsumer):
                self._send_to_consumer(effect)
            elif isinstance(effect, SendToProducer):
                self._send_to_producer(effect)
            elif isinstance(effect, EndGrant):
                self._ending[effect.grant] = effect
            elif isinstance(effect, Connect):
                self._dialled = self._dialled or effect.address == PRODUCER
                if self._cut or effect.address != PRODUCER:
                    self._changes.append((effect.address, False))
                else:
                    self._connect()
            elif isinstance(effect, Disconnect) and effect.address == PRODUCER:
                self._dialled = False
                self._unsent.clear()
                self.transport.lose_all()
            elif isinstance(effect, CopyFromPeer):
                self._start(effect)
            elif isinstance(effect, StopCopy):
                self._copies = [c for c in self._copies if c.effect.xfer_id != effect.xfer_id]
                self._unpacks = [u for u in self._unpacks if u.xfer_id != effect.xfer_id]
            elif isinstance(effect, Unpack):
                self._unpacks.append(effect)
            elif isinstance(effect, Book):
                effect.account.end(self.clock.now)
                self.fetched.append(effect.account)
        self._sweep()

    @property
    def _peer(self) -> bytes:
        return b"connection-%d" % self._connections

    def _connect(self) -> None:
        self._connections += 1
        unsent, self._unsent = self._unsent, []
        for body in unsent:
            self.transport.to_producer.send(Frame(self._peer, body))
        self._changes.append((PRODUCER, True))

    def _change(self, address: Address, up: bool) -> None:
        if up:
            self._do(self.consumer.peer_up(address, self.clock.now))
            return
        self._faults += [(copy.effect.xfer_id, "the peer is gone") for copy in self._copies]
        self._copies.clear()
        self._do(self.consumer.peer_down(address, self.clock.now))

    def _send_to_producer(self, effect: SendToProducer) -> None:
        if effect.address != PRODUCER or not self._dialled:
            return
        body = encode(effect.message)
        if effect.account is not None:
            effect.account.header_out += len(body)
        if self._cut or not self._connections:
            self._unsent.append(body)
        else:
            self.transport.to_producer.send(Frame(self._peer, body))

    def _send_to_consumer(self, effect: SendToConsumer) -> None:
        if self._cut or not self._dialled or effect.peer != self._peer:
            self._do(self.producer.peer_gone(effect.peer))
            return
        frame = Frame(effect.peer, encode(effect.message), effect.payload, effect.grant)
        if effect.codec and effect.payload is not None and isinstance(effect.message, XferChunk):
            frame = self._packed(frame, effect.message, effect.payload, effect.codec)
        if effect.account is not None:
            effect.account.header_out += len(frame.body)
            payload = effect.payload.nbytes if effect.payload is not None else 0
            effect.account.payload_out += payload if frame.packed is None else len(frame.packed)
        self.transport.to_consumer.send(frame)

    def _packed(self, frame: Frame, chunk: XferChunk, span: Span, codec: str) -> Frame:
        entry = span.entry
        run = self._there.read(entry.extents, span.nbytes, span.offset)
        packed = pack(codec, run, entry.dtype, entry.shape)
        if packed is None:
            return frame
        chunk = msgspec.structs.replace(
            chunk, codec=codec, packed_nbytes=len(packed.data), checksum=packed.checksum
        )
        return Frame(frame.peer, encode(chunk), packed=packed.data)

    def _at_producer(self, frame: Frame) -> None:
        message, header, now = decode_to_producer(frame.body), len(frame.body), self.clock.now
        if isinstance(message, XferReq):
            self._do(self.producer.asked(frame.peer, message, now, header=header))
        elif isinstance(message, XferCredit):
            self._do(self.producer.credited(frame.peer, message, now, header=header))
        elif isinstance(message, XferPing):
            self._do(self.producer.pinged(frame.peer, message))
        else:
            self._do(self.producer.done(frame.peer, message, header=header))

    def _at_consumer(self, frame: Frame) -> None:
        message = decode_to_consumer(frame.body)
        if isinstance(message, XferPong):
            self.pongs.append(message)
            return
        received: int | memoryview | None = None
        if frame.payload is not None or frame.packed is not None:
            data = frame.packed or b""
            if frame.payload is not None:
                source = frame.payload
                data = self._there.read(source.entry.extents, source.nbytes, source.offset)
            target = self.consumer.landing(PRODUCER, message)
            received = 0
            if isinstance(target, Span):
                received = len(data)
                self._here.write(target.entry.extents, data[: target.nbytes], target.offset)
            elif target is not None:
                received = memoryview(data) if len(data) == target else 0
        now = self.clock.now
        if isinstance(message, XferAck):
            came = received if isinstance(received, int | None) else 0
            effects = self.consumer.answered(PRODUCER, message, came, now, header=len(frame.body))
        else:
            effects = self.consumer.arrived(
                PRODUCER, message, received, now, header=len(frame.body)
            )
        self._do(effects)

    def _unpack(self, job: Unpack) -> None:
        chunk, fault = job.chunk, ""
        span = self.consumer.unpacking_to(job.xfer_id, chunk)
        try:
            rows = unpack(chunk.codec, job.data, chunk.checksum, chunk.nbytes, job.dtype, job.shape)
        except CodecError as error:
            fault = str(error)
        else:
            if span is not None:
                self._here.write(span.entry.extents, rows.tobytes(), span.offset)
        self._do(self.consumer.unpacked(job.xfer_id, chunk, fault, self.clock.now))

    def _start(self, effect: CopyFromPeer) -> None:
        if not self.can_map:
            self._faults.append((effect.xfer_id, "the region cannot be mapped"))
            return
        copy = _Copy(effect)
        self._copy(copy, effect.target.nbytes // 2)
        self._copies.append(copy)

    def _finish(self, copy: _Copy) -> None:
        effect = copy.effect
        self._copy(copy, effect.target.nbytes)
        torn = self._there.generation(effect.extents[0][0]) != effect.generation
        fault = "overwritten while it was read" if torn else ""
        self._do(self.consumer.copied(effect.xfer_id, fault, self.clock.now))

    def _copy(self, copy: _Copy, until: int) -> None:
        effect = copy.effect
        data = self._there.read(effect.extents, until - copy.done, copy.done)
        self._here.write(effect.target.extents, data, copy.done)
        copy.done = until

    def _sweep(self) -> None:
        """Unpin the grants that ended and have nothing on its way any more."""
        leaving = {frame.grant for frame in self.transport.to_consumer.pending}
        for grant in [grant for grant in self._ending if grant not in leaving]:
            ending = self._ending.pop(grant)
            self.producer_pool.unpin(ending.entry.generation, grant, self.clock.now)
            ending.account.end(self.clock.now)
            self.served.append(ending.account)
