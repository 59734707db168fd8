# SPDX-License-Identifier: Apache-2.0
"""A producer's and a consumer's state machines face to face, bytes included.

Everything that an agent's loop does with sockets and mapped memory is done here
with lists and plain bytes: messages are encoded and decoded, payload is read
from the producer's pool at the moment it arrives (as ZMQ reads a frame when it
leaves), pins outlast what is on its way, and freed blocks are spoilt.

Example:
    >>> pair = Pair()
    >>> pair.save("an image", b"rows of numbers")
    >>> pair.fetch("an image", 15)
    >>> pair.run()
    >>> pair.bytes_of(pair.ready("an image"))
    b'rows of numbers'
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ec_connector.errors import InternalError
from ec_connector.protocol.local import (
    Failed,
    FetchItem,
    Ready,
    Reserve,
    ReservedItem,
    ReserveItem,
    Saved,
    SaveFailed,
)
from ec_connector.protocol.saves import Lost
from ec_connector.testing.wiring import PRODUCER, TOO_MANY_TURNS, Wiring

CLIENT = b"client"
_ENGINE = b"engine"


class Pair(Wiring):
    """One producer and one consumer.

    ``transport`` is between them and ``clock`` is theirs. With ``hold_copies``
    copies through shared memory stop half way until it is False again; without
    ``can_map`` there is no shared memory to be had.
    ``answers`` is all that the consumer's clients were told, in order.

    Args:
        blocks, block_bytes: size of each of the two pools.
        planes: planes that both sides know, best first.
        producer_identity, consumer_identity: what the two engines are.
        chunk_bytes, window_bytes, connect_timeout: as for ``ConsumerMachine``.
        lease, max_parked: as for ``ProducerMachine``.
        producer_codecs, consumer_codecs: ``codecs`` of each.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._places: dict[str, ReservedItem] = {}
        self._calls = 0

    # ── the producer's engine ────────────────────────────────────────────────

    def reserve(self, key: str, nbytes: int, step: int = 0, *, replace: bool = False) -> str:
        """Room for a save at the producer. Returns why there is none; empty when there is."""
        self._calls += 1
        item = ReserveItem(key, nbytes, "uint8", [nbytes])
        message = Reserve(self._calls, step, [item], replace=replace)
        place = self.desk.reserve(_ENGINE, message, self.clock.now).items[0]
        if not place.refused and not place.held:
            self._places[key] = place
        return place.refused

    def save(self, key: str, data: bytes) -> None:
        """Save an item, with room reserved before or just now. Raises ValueError without room."""
        if key not in self._places and (refused := self.reserve(key, len(data))):
            raise ValueError(refused)
        place = self._places.pop(key, None)
        if place is None:
            return  # it is there already
        self._there.write(place.extents, data)
        for ready in self.desk.saved(Saved([(key, place.generation)]), self.clock.now):
            self._do(self.producer.saved(ready, self.clock.now))

    def fail(self, key: str, message: str, traceback: str = "") -> None:
        """Let a reserved save fail. Raises KeyError if there is none of that key."""
        generation = self._places.pop(key).generation
        self._tell_lost(self.desk.failed(SaveFailed(key, generation, message, traceback)))

    def step_done(self, step: int) -> None:
        """The engine is past this step: give up what it reserved and did not save."""
        lost = self.desk.step_done(_ENGINE, step)
        self._places = {
            key: place
            for key, place in self._places.items()
            if (entry := self.producer_pool.get(key)) is not None
            and entry.generation == place.generation
        }
        self._tell_lost(lost)

    # ── the consumer's clients ───────────────────────────────────────────────

    def fetch(self, key: str, nbytes: int, client: bytes = CLIENT, timeout: float = 5.0) -> None:
        """Let a client of the consumer ask for an item of this size."""
        item = FetchItem(
            key, int(timeout * 1000), PRODUCER.host, PRODUCER.port, nbytes, "uint8", [nbytes]
        )
        self._do(self.consumer.fetch(client, item, self.clock.now))

    def release(self, key: str, client: bytes = CLIENT) -> None:
        """Let a client need an item no longer."""
        self._do(self.consumer.release(client, key, self.clock.now))

    def loaded(self, key: str, client: bytes = CLIENT) -> None:
        """Let a client have copied an item out of the pool."""
        self._do(self.consumer.loaded(client, key))

    def of_key(self, key: str, client: bytes = CLIENT) -> list[Ready | Failed]:
        """All that a client was told about a key."""
        return [
            message
            for told, message in self.answers
            if told == client and isinstance(message, Ready | Failed) and message.key == key
        ]

    def ready(self, key: str, client: bytes = CLIENT) -> Ready:
        """The last answer about a key. Raises LookupError if it is not a Ready."""
        answers = self.of_key(key, client)
        if not answers or not isinstance(answers[-1], Ready):
            raise LookupError(f"{key!r} was not delivered: {answers[-1:]}")
        return answers[-1]

    def failed(self, key: str, client: bytes = CLIENT) -> Failed:
        """The last answer about a key. Raises LookupError if it is not a Failed."""
        answers = self.of_key(key, client)
        if not answers or not isinstance(answers[-1], Failed):
            raise LookupError(f"{key!r} did not fail: {answers[-1:]}")
        return answers[-1]

    def bytes_of(self, ready: Ready) -> bytes:
        """What lies in the consumer's pool where ``ready`` says."""
        return self._here.read(ready.extents, ready.nbytes)

    # ── the network and the time ─────────────────────────────────────────────

    def partition(self) -> None:
        """Break the connection: what is on its way is lost, and nothing gets through."""
        if self._cut:
            return
        self._cut = True
        self.transport.lose_all()
        if self._dialled:
            self._changes.append((PRODUCER, False))

    def heal(self) -> None:
        """Let them connect again; what the consumer sent meanwhile goes out first."""
        if not self._cut:
            return
        self._cut = False
        if self._dialled:
            self._connect()

    def advance(self, seconds: float) -> None:
        """Let time pass; everything that falls due on the way happens when it is due."""
        until = self.clock.now + seconds
        for _ in range(TOO_MANY_TURNS):
            self.run()
            times = (self.producer.deadline(), self.consumer.deadline(), self.transport.next_due())
            soonest = min((when for when in times if when is not None), default=until)
            self.clock.now = max(self.clock.now, min(soonest, until))
            self._tick()
            if soonest >= until:
                self.run()
                return
        raise InternalError("the same moment is due again and again")

    def validate(self) -> None:
        """Raise InternalError if a pool, a machine or a pin is not as it must be."""
        self.producer_pool.validate()
        self.consumer_pool.validate()
        self.producer.validate()
        self.consumer.validate()
        for frame in self.transport.to_consumer.pending:
            if frame.payload is not None and frame.grant not in frame.payload.entry.pins:
                raise InternalError(f"bytes of {frame.grant} are on their way without a pin")

    def _tell_lost(self, lost: Iterable[Lost]) -> None:
        for item in lost:
            self._do(self.producer.lost(item.key, item.message, item.traceback))
