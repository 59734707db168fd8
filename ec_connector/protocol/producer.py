# SPDX-License-Identifier: Apache-2.0
"""The producer's half of a transfer: who was promised which bytes.

Rules:

1. A grant is named by ``(session_id, mm_hash)``, without a session by its peer.
   Asking again replaces it, so a consumer that lost an answer simply asks again.
2. A request for an item that is being saved is parked, and answered in the same
   call that learns of the save. Nobody polls.
3. Bytes are sent only under a pin, and at most as many as the consumer gave
   credit for. Only ``EndGrant`` ends a pin.
4. A pin ends by the consumer's ``done``, by its lease, or with its peer.
5. Whatever a peer sends, the answer is a message or nothing, never an exception.

::

    asked ──ready──────────────► GRANTED ──done / lease / peer gone──► ended
      │                             ▲
      ├──being saved──► PARKED ─────┘ saved
      │                    └────────► NACK (save failed, too late)
      └──otherwise────► NACK
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from ec_connector.errors import InternalError
from ec_connector.pool.blocks import BlockPool, Entry, EntryState
from ec_connector.protocol.deadlines import Deadlines
from ec_connector.protocol.effects import Effect, EndGrant, SendToConsumer, Span
from ec_connector.protocol.fingerprint import Identity, agree
from ec_connector.protocol.messages import (
    EC_CONNECTOR_VERSION,
    MAX_CREDIT_BYTES,
    MAX_EXTENTS,
    MAX_TEXT_CHARS,
    RegionRef,
    XferAck,
    XferChunk,
    XferCredit,
    XferDone,
    XferReq,
    XferStatus,
)

MAX_CHUNK_BYTES: Final = 16 * 1024 * 1024
MIN_CHUNK_BYTES: Final = 4 * 1024
MAX_PARK_SECONDS: Final = 600.0

GrantKey = tuple[str, str]


@dataclass(slots=True)
class _Grant:
    peer: bytes
    req: XferReq
    entry: Entry
    pin: str
    chunk: int
    credit: int
    sent: int = 0


@dataclass(slots=True)
class _Parked:
    peer: bytes
    req: XferReq
    park_until: float


class ProducerMachine:
    """Decides what consumers get.

    Args:
        pool: the agent's pool; this machine pins and unpins in it.
        identity: what this engine is; a request of another kind is refused.
        region: how a process of this host finds the pool's memory.
        planes: planes this producer offers, best first.
        lease: seconds a grant lives without word from its consumer.
        max_parked: requests that may wait for saves at one time.
        own_session: session of this agent's own consumer. What that one asks for is not here:
            its request would only wait for itself.
    """

    def __init__(
        self,
        pool: BlockPool,
        identity: Identity,
        region: RegionRef,
        *,
        planes: tuple[str, ...] = ("zmq",),
        lease: float = 30.0,
        max_parked: int = 4096,
        own_session: str | None = None,
    ) -> None:
        self._pool = pool
        self.identity = identity
        self._region = region
        self._planes = planes
        self._lease = lease
        self._max_parked = max_parked
        self._own_session = own_session
        self._grants: dict[GrantKey, _Grant] = {}
        self._parked: dict[GrantKey, _Parked] = {}
        self._parked_on: dict[str, set[GrantKey]] = {}
        self._leases: Deadlines[GrantKey] = Deadlines()
        self._parking: Deadlines[GrantKey] = Deadlines()
        self._pins = 0
        self.counts: Counter[str] = Counter()

    # ── events ───────────────────────────────────────────────────────────────

    def asked(self, peer: bytes, req: XferReq, now: float) -> list[Effect]:
        """A consumer wants an item."""
        self.counts["requests"] += 1
        key = _key(peer, req)
        effects = self._end(key)
        if refusal := self._gate(req):
            return [*effects, self._nack(peer, req, refusal)]
        entry = self._pool.get(req.mm_hash)
        if entry is None or (entry.state is EntryState.SAVING and self._is_own(req)):
            text = "neither held nor being saved here"
            return [*effects, self._nack(peer, req, _Refusal(XferStatus.NACK_MISSING, text))]
        if entry.state is EntryState.READY:
            return [*effects, *self._grant(peer, req, entry, now)]
        if len(self._parked) >= self._max_parked:
            text = f"{self._max_parked} requests are parked already"
            return [*effects, self._nack(peer, req, _Refusal(XferStatus.NACK_NOT_READY, text))]
        wait = min(req.timeout_ms / 1000.0, MAX_PARK_SECONDS)
        self._parked[key] = _Parked(peer, req, now + wait)
        self._parked_on.setdefault(req.mm_hash, set()).add(key)
        self._parking.set(key, now + wait)
        self.counts["parked"] += 1
        return effects

    def saved(self, mm_hash: str, now: float) -> list[Effect]:
        """An item became ready: answer whoever waited for it."""
        entry = self._pool.get(mm_hash)
        effects: list[Effect] = []
        for parked in self._unpark_all(mm_hash):
            if entry is not None and entry.state is EntryState.READY:
                effects += self._grant(parked.peer, parked.req, entry, now)
        return effects

    def lost(self, mm_hash: str, message: str, traceback: str = "") -> list[Effect]:
        """An item will not be saved after all: tell whoever waited for it, at once.

        With a ``traceback`` or ``message`` the save failed (NACK_INTERNAL);
        with neither it was given up (NACK_MISSING).
        """
        if message or traceback:
            refusal = _Refusal(XferStatus.NACK_INTERNAL, message, traceback=traceback)
        else:
            refusal = _Refusal(XferStatus.NACK_MISSING, "the save was given up")
        return [self._nack(p.peer, p.req, refusal) for p in self._unpark_all(mm_hash)]

    def drop_all(self) -> list[Effect]:
        """The model's weights changed: nothing that is being saved now will be served."""
        return [effect for mm_hash in list(self._parked_on) for effect in self.lost(mm_hash, "")]

    def credited(self, peer: bytes, credit: XferCredit, now: float) -> list[Effect]:
        """A consumer has room for more of a grant."""
        key = _key(peer, credit)
        grant = self._grants.get(key)
        if grant is None or grant.peer != peer or grant.req.xfer_id != credit.xfer_id:
            return []
        grant.credit = min(grant.credit + credit.nbytes, MAX_CREDIT_BYTES)
        self._leases.set(key, now + self._lease)
        return self._push(grant)

    def done(self, peer: bytes, done: XferDone) -> list[Effect]:
        """A consumer has what it wanted, or wants it no more."""
        key = _key(peer, done)
        grant = self._grants.get(key)
        parked = self._parked.get(key)
        if grant is not None and grant.peer == peer and grant.req.xfer_id == done.xfer_id:
            return self._end(key)
        if parked is not None and parked.peer == peer and parked.req.xfer_id == done.xfer_id:
            self._unpark(key)
        return []

    def peer_gone(self, peer: bytes) -> list[Effect]:
        """No message can reach this peer any more: its grants end."""
        effects: list[Effect] = []
        for key in [k for k, g in self._grants.items() if g.peer == peer]:
            effects += self._end(key)
        for key in [k for k, p in self._parked.items() if p.peer == peer]:
            self._unpark(key)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Let pass what is over: leases, and the patience of parked requests."""
        effects: list[Effect] = []
        for key in self._leases.due(now):
            self.counts["leases_expired"] += 1
            effects += self._end(key)
        for key in self._parking.due(now):
            parked = self._parked[key]
            self._unpark(key)
            refusal = _Refusal(XferStatus.NACK_NOT_READY, "still being saved")
            effects.append(self._nack(parked.peer, parked.req, refusal))
        return effects

    def deadline(self) -> float | None:
        """When :meth:`tick` has work next."""
        times = [t for t in (self._leases.next(), self._parking.next()) if t is not None]
        return min(times, default=None)

    def gauges(self) -> dict[str, int]:
        """Grants and parked requests at this moment."""
        return {"grants": len(self._grants), "parked_now": len(self._parked)}

    def validate(self) -> None:
        """Raise InternalError if the tables disagree with each other."""
        if len(self._leases) != len(self._grants) or len(self._parking) != len(self._parked):
            raise InternalError("a grant or a parked request without its deadline")
        if sum(map(len, self._parked_on.values())) != len(self._parked):
            raise InternalError("parked requests and their index differ")
        for grant in self._grants.values():
            if grant.pin not in grant.entry.pins:
                raise InternalError(f"grant {grant.pin} of {grant.entry.key} has no pin")

    # ── the gate ─────────────────────────────────────────────────────────────

    def _is_own(self, req: XferReq) -> bool:
        return self._own_session is not None and req.session_id == self._own_session

    def _gate(self, req: XferReq) -> _Refusal | None:
        if req.connector_version != EC_CONNECTOR_VERSION:
            text = (
                f"the consumer speaks wire version {req.connector_version}, "
                f"this producer {EC_CONNECTOR_VERSION}"
            )
            return _Refusal(XferStatus.NACK_VERSION, text)
        difference = agree(self.identity, Identity(req.compatibility_hash, req.fingerprint))
        if difference is None:
            return None
        factor, mine, theirs = difference
        text = f"{factor} differs: {mine!r} at the producer, {theirs!r} at the consumer"
        return _Refusal(XferStatus.NACK_INCOMPAT, text, factor=factor)

    # ── grants ───────────────────────────────────────────────────────────────

    def _grant(self, peer: bytes, req: XferReq, entry: Entry, now: float) -> list[Effect]:
        key = _key(peer, req)
        self._pins += 1
        pin = f"grant/{self._pins}"
        self._pool.pin(entry.key, pin, None, now)
        chunk = min(max(req.chunk_bytes, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
        credit = min(req.credit_bytes, MAX_CREDIT_BYTES)
        grant = _Grant(peer, req, entry, pin, chunk, credit)
        self._grants[key] = grant
        self._leases.set(key, now + self._lease)
        self.counts["grants_made"] += 1
        ack = XferAck(mm_hash=req.mm_hash, status=XferStatus.OK, session_id=req.session_id)
        if not req.planes and not req.credit_bytes:
            # A peer that knows the base fields only: an ack of base fields, the bytes behind it,
            # and no "done" to wait for.
            whole = Span(entry, 0, entry.nbytes)
            return [SendToConsumer(peer, ack, whole, pin), *self._end(key)]
        ack.xfer_id = req.xfer_id
        ack.nbytes, ack.dtype, ack.shape = entry.nbytes, entry.dtype, list(entry.shape)
        both = "memory" in self._planes and "memory" in req.planes
        if both and len(entry.extents) <= MAX_EXTENTS:
            ack.plane, ack.region = "memory", self._region
            ack.extents, ack.generation = list(entry.extents), entry.generation
            return [SendToConsumer(peer, ack)]
        ack.plane = "zmq"
        if entry.nbytes <= min(credit, chunk):
            grant.sent = entry.nbytes
            return [SendToConsumer(peer, ack, Span(entry, 0, entry.nbytes), pin)]
        return [SendToConsumer(peer, ack), *self._push(grant)]

    def _push(self, grant: _Grant) -> list[Effect]:
        effects: list[Effect] = []
        while grant.sent < grant.entry.nbytes:
            nbytes = min(grant.chunk, grant.entry.nbytes - grant.sent)
            if nbytes > grant.credit:
                break
            chunk = XferChunk(grant.req.session_id, grant.req.xfer_id, grant.sent, nbytes)
            payload = Span(grant.entry, grant.sent, nbytes)
            effects.append(SendToConsumer(grant.peer, chunk, payload, grant.pin))
            grant.sent += nbytes
            grant.credit -= nbytes
        return effects

    def _end(self, key: GrantKey) -> list[Effect]:
        if key in self._parked:
            self._unpark(key)
        grant = self._grants.pop(key, None)
        if grant is None:
            return []
        self._leases.cancel(key)
        return [EndGrant(grant.entry, grant.pin)]

    # ── parked requests ──────────────────────────────────────────────────────

    def _unpark(self, key: GrantKey) -> None:
        del self._parked[key]
        self._parking.cancel(key)
        waiting = self._parked_on[key[1]]
        waiting.discard(key)
        if not waiting:
            del self._parked_on[key[1]]

    def _unpark_all(self, mm_hash: str) -> list[_Parked]:
        keys = sorted(self._parked_on.get(mm_hash, ()))
        parked = [self._parked[key] for key in keys]
        for key in keys:
            self._unpark(key)
        return parked

    def _nack(self, peer: bytes, req: XferReq, refusal: _Refusal) -> SendToConsumer:
        self.counts[f"nack_{refusal.status.name.removeprefix('NACK_').lower()}"] += 1
        ack = XferAck(mm_hash=req.mm_hash, status=refusal.status, session_id=req.session_id)
        if req.planes or req.credit_bytes:
            ack.xfer_id = req.xfer_id
            ack.message, ack.factor = refusal.message[:MAX_TEXT_CHARS], refusal.factor
            ack.traceback = refusal.traceback[-MAX_TEXT_CHARS:]
        return SendToConsumer(peer, ack)


def _key(peer: bytes, message: XferReq | XferCredit | XferDone) -> GrantKey:
    # Consumers that name no session must not end each other's grants.
    return message.session_id or f"peer/{peer.hex()}", message.mm_hash


@dataclass(frozen=True, slots=True)
class _Refusal:
    status: XferStatus
    message: str
    factor: str = ""
    traceback: str = ""
