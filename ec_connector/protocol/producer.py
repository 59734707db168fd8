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

The states of a request are the table ``GRANT``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from ec_connector.codecs.choice import EXACT, LOSS, NONE, aligned_chunk, choose, loss_of
from ec_connector.errors import InternalError
from ec_connector.pool.blocks import BlockPool, Entry
from ec_connector.protocol.account import PRODUCER, SENDING, Account
from ec_connector.protocol.deadlines import Deadlines
from ec_connector.protocol.effects import Effect, EndGrant, SendToConsumer, Span
from ec_connector.protocol.fingerprint import Identity, agree
from ec_connector.protocol.grant import Grant, GrantState
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
    XferPing,
    XferPong,
    XferReq,
    XferStatus,
)
from ec_connector.protocol.parking import GrantKey, Parking
from ec_connector.protocol.shown import proof_of
from ec_connector.protocol.tickets import Tickets

MAX_CHUNK_BYTES: Final = 16 * 1024 * 1024
MIN_CHUNK_BYTES: Final = 4 * 1024
MAX_PARK_SECONDS: Final = 600.0
MAX_GRANTS_OF_PEER: Final = 1024
"""Items that one connection may hold at one time, under whatever sessions; each is a pin."""


class ProducerMachine:
    """Decides what consumers get.

    Args:
        pool: the agent's pool; this machine pins and unpins in it.
        identity: what this engine is; a request of another kind is refused.
        region: how a process of this host finds the pool's memory.
        secret: what stands in that memory to prove by what is shown of it.
        planes: planes this producer offers, best first.
        lease: seconds a grant lives without word from its consumer.
        max_parked: requests that may wait for saves at one time, shared as ``Parking`` says.
        own_session: session of this agent's own consumer. What that one asks for is not here:
            its request would only wait for itself.
        tickets: with them only requests are served that carry the item's ticket.
        announced_at: host and port that this producer's announcements name.
        codecs: what payload may be packed with over ZMQ; ``none``: it may go as it is.
        behind: whether a peer has not read so much that it should get no more for now.
    """

    def __init__(
        self,
        pool: BlockPool,
        identity: Identity,
        region: RegionRef,
        *,
        secret: bytes = b"",
        planes: tuple[str, ...] = ("zmq",),
        lease: float = 30.0,
        max_parked: int = 4096,
        own_session: str | None = None,
        tickets: Tickets | None = None,
        announced_at: tuple[str, int] = ("", 0),
        codecs: tuple[str, ...] = (NONE,),
        behind: Callable[[bytes], bool] = lambda _peer: False,
    ) -> None:
        self._pool = pool
        self.identity = identity
        self._region = region
        self._secret = secret
        self._planes = planes
        self._lease = lease
        self._own_session = own_session
        self._tickets = tickets
        self._announced_at = announced_at
        self._codecs = codecs
        self._behind = behind
        self._grants: dict[GrantKey, Grant] = {}
        self._of_peer: dict[bytes, set[GrantKey]] = {}
        self._parking = Parking(max_parked)
        self._leases: Deadlines[GrantKey] = Deadlines()
        self._pins = 0
        self.counts: Counter[str] = Counter()

    # ── events ───────────────────────────────────────────────────────────────

    def asked(
        self, peer: bytes, req: XferReq, now: float, *, header: int = 0, host: str = ""
    ) -> list[Effect]:
        """A consumer wants an item. ``header``: bytes of the message; ``host`` it came from."""
        self.counts["requests"] += 1
        key = _key(peer, req)
        effects = self._end(key, "asked again") if key in self._grants else []
        account = Account(req.mm_hash, host, host, PRODUCER, now, header_in=header)
        grant = Grant(peer, req, account)
        if refusal := self._gate(req):
            return [*effects, self._refuse(grant, refusal)]
        entry = self._pool.get(req.mm_hash)
        if entry is not None and not self._has_ticket(req, entry):
            self.counts["tickets_refused"] += 1
            entry = None  # who has no ticket does not learn what is here
        if entry is None or (entry.saving and self._is_own(req)):
            text = "neither held nor being saved here"
            if self._tickets is not None:
                text += ", or asked for without its ticket"
            return [*effects, self._refuse(grant, _Refusal(XferStatus.NACK_MISSING, text))]
        if entry.ready and (self._granted_to(peer) >= MAX_GRANTS_OF_PEER or self._behind(peer)):
            text = f"this peer holds {MAX_GRANTS_OF_PEER} items, or does not read what it asked for"
            return [*effects, self._refuse(grant, _Refusal(XferStatus.NACK_NOT_READY, text))]
        if entry.ready:
            return [*effects, *self._grant(key, grant, entry, now)]
        if self._parking.full():
            text = f"no place to wait: {len(self._parking)} requests are parked already"
            no_place = _Refusal(XferStatus.NACK_NOT_READY, text)
            other = self._parking.gives_way_to(peer)
            if other is None:
                return [*effects, self._refuse(grant, no_place)]
            effects.append(self._refuse(self._drop(other), no_place))
        grant.move("parked")
        self._keep(key, grant)
        self._parking.add(key, peer, now + min(req.timeout_ms / 1000.0, MAX_PARK_SECONDS))
        self.counts["parked"] += 1
        return effects

    def saved(self, mm_hash: str, now: float) -> list[Effect]:
        """An item became ready: answer whoever waited for it."""
        entry = self._pool.get(mm_hash)
        if entry is None or not entry.ready:
            return self.lost(mm_hash, "")
        effects: list[Effect] = []
        for key in self._parking.waiting_for(mm_hash):
            effects += self._grant(key, self._drop(key), entry, now)
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
        waiting = self._parking.waiting_for(mm_hash)
        return [self._refuse(self._drop(key), refusal) for key in waiting]

    def drop_all(self) -> list[Effect]:
        """The model's weights changed: nothing that is being saved now will be served."""
        return [effect for mm_hash in self._parking.items() for effect in self.lost(mm_hash, "")]

    def credited(
        self, peer: bytes, credit: XferCredit, now: float, *, header: int = 0
    ) -> list[Effect]:
        """A consumer has room for more of a grant."""
        key = _key(peer, credit)
        grant = self._grants.get(key)
        if grant is None or not grant.is_of(peer, credit.xfer_id) or grant.entry is None:
            return []
        grant.account.header_in += header
        grant.credit = min(grant.credit + credit.nbytes, MAX_CREDIT_BYTES)
        self._leases.set(key, now + self._lease)
        return self._push(grant, grant.entry)

    def done(self, peer: bytes, done: XferDone, *, header: int = 0) -> list[Effect]:
        """A consumer has what it wanted, or wants it no more."""
        key = _key(peer, done)
        grant = self._grants.get(key)
        if grant is None or not grant.is_of(peer, done.xfer_id):
            return []
        grant.account.header_in += header
        return self._end(key, "done")

    def pinged(self, peer: bytes, ping: XferPing) -> list[Effect]:
        """Somebody asks what this is. Who may not have items does not learn it either."""
        self.counts["pings"] += 1
        if self._tickets is not None and not self._tickets.verify_ping(ping.ticket, ping.seq):
            self.counts["tickets_refused"] += 1
            return [SendToConsumer(peer, XferPong(ping.seq, withheld=True))]
        usage, gauges = self._pool.usage(), self.gauges()
        pong = XferPong(
            ping.seq,
            compatibility_hash=self.identity.compatibility_hash,
            fingerprint=dict(self.identity.factors),
            planes=list(self._planes),
            codecs=list(self._codecs),
            block_bytes=self._region.block_bytes,
            blocks=usage.num_blocks,
            blocks_free=usage.free,
            blocks_pinned=usage.pinned,
            items=usage.entries,
            grants=gauges["grants"],
            parked=gauges["parked_now"],
        )
        return [SendToConsumer(peer, pong)]

    def peer_gone(self, peer: bytes) -> list[Effect]:
        """No message can reach this peer any more: its grants end."""
        keys = sorted(self._of_peer.get(peer, ()))
        return [effect for key in keys for effect in self._end(key, "peer gone")]

    def tick(self, now: float) -> list[Effect]:
        """Let pass what is over: leases, and the patience of parked requests."""
        effects: list[Effect] = []
        for key in self._leases.due(now):
            self.counts["leases_expired"] += 1
            effects += self._end(key, "lease over")
        for key in self._parking.due(now):
            grant = self._grants[key]
            effects += self._end(key, "too late")
            effects.append(
                self._nack(grant, _Refusal(XferStatus.NACK_NOT_READY, "still being saved"))
            )
        return effects

    def deadline(self) -> float | None:
        """When :meth:`tick` has work next."""
        times = [t for t in (self._leases.next(), self._parking.next()) if t is not None]
        return min(times, default=None)

    def gauges(self) -> dict[str, int]:
        """Grants and parked requests at this moment."""
        parked = len(self._parking)
        return {"grants": len(self._grants) - parked, "parked_now": parked}

    def validate(self) -> None:
        """Raise InternalError if the tables disagree with each other."""
        parked = {k for k, grant in self._grants.items() if grant.state is GrantState.PARKED}
        granted = {k: g for k, g in self._grants.items() if g.state is GrantState.GRANTED}
        if len(parked) + len(granted) != len(self._grants):
            raise InternalError("a request is kept that is neither parked nor granted")
        if len(self._leases) != len(granted):
            raise InternalError("a grant without its lease")
        self._parking.validate(parked)
        by_peer = {(g.peer, key) for key, g in self._grants.items()}
        if by_peer != {(peer, key) for peer, keys in self._of_peer.items() for key in keys}:
            raise InternalError("grants and their peers differ")
        for grant in granted.values():
            if grant.entry is None or grant.pin not in grant.entry.pins:
                raise InternalError(f"grant {grant.pin} of {grant.req.mm_hash} has no pin")

    # ── the gate ─────────────────────────────────────────────────────────────

    def _is_own(self, req: XferReq) -> bool:
        return self._own_session is not None and req.session_id == self._own_session

    def _has_ticket(self, req: XferReq, entry: Entry) -> bool:
        if self._tickets is None:
            return True
        host, port = self._announced_at
        return self._tickets.verify(
            req.ticket, entry.key, host, port, entry.nbytes, entry.dtype, entry.shape
        )

    def _gate(self, req: XferReq) -> _Refusal | None:
        if req.connector_version != EC_CONNECTOR_VERSION:
            text = (
                f"the consumer speaks wire version {req.connector_version}, "
                f"this producer {EC_CONNECTOR_VERSION}"
            )
            return _Refusal(XferStatus.NACK_VERSION, text)
        difference = agree(self.identity, Identity(req.compatibility_hash, req.fingerprint))
        # Who does not know the word loses nothing, and takes nothing that has lost.
        loss = (loss_of(self._codecs), req.fingerprint.get(LOSS, EXACT))
        if difference is None and loss[0] != loss[1]:
            difference = (LOSS, *loss)
        if difference is None:
            return None
        factor, mine, theirs = difference
        text = f"{factor} differs: {mine!r} at the producer, {theirs!r} at the consumer"
        if factor == LOSS:
            text += "; put the lossy codec into codecs on both sides, or on neither"
        return _Refusal(XferStatus.NACK_INCOMPAT, text, factor=factor)

    def _no_codec(self, req: XferReq, entry: Entry) -> _Refusal:
        text = (
            f"no codec for {entry.dtype} of shape {list(entry.shape)}: the producer has codecs="
            f"{list(self._codecs)}, the consumer takes {req.codecs or [NONE]}"
        )
        return _Refusal(XferStatus.NACK_INCOMPAT, text, factor="codecs")

    # ── grants ───────────────────────────────────────────────────────────────

    def _grant(self, key: GrantKey, grant: Grant, entry: Entry, now: float) -> list[Effect]:
        peer, req = grant.peer, grant.req
        mapped = "memory" in self._planes and "memory" in req.planes
        mapped = mapped and len(entry.extents) <= MAX_EXTENTS
        grant.chunk = min(max(req.chunk_bytes, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
        codec = NONE
        if entry.nbytes and not mapped:
            found = choose(req.codecs, self._codecs, entry.dtype, entry.shape, grant.chunk)
            if found is None:
                return [self._refuse(grant, self._no_codec(req, entry))]
            codec = found
        grant.move("granted")
        self._pins += 1
        grant.entry, grant.pin = entry, f"grant/{self._pins}"
        account = grant.account
        account.turn(SENDING, now)
        account.nbytes = entry.nbytes
        self._pool.pin(entry.key, grant.pin, None, now)
        grant.credit = min(req.credit_bytes, MAX_CREDIT_BYTES)
        self._keep(key, grant)
        self._leases.set(key, now + self._lease)
        self.counts["grants_made"] += 1
        ack = XferAck(mm_hash=req.mm_hash, status=XferStatus.OK, session_id=req.session_id)
        if not req.planes and not req.credit_bytes:
            # A peer that knows the base fields only: an ack of base fields, the bytes behind it,
            # and no "done" to wait for.
            whole = Span(entry, 0, entry.nbytes)
            account.plane = "zmq"
            sent = SendToConsumer(peer, ack, whole, grant.pin, account=account)
            return [sent, *self._end(key, "sent whole")]
        ack.xfer_id = req.xfer_id
        ack.nbytes, ack.dtype, ack.shape = entry.nbytes, entry.dtype, list(entry.shape)
        if mapped:
            ack.plane, ack.region = "memory", self._region
            ack.extents, ack.generation = list(entry.extents), entry.generation
            ack.proof = proof_of(self._secret, entry.generation, entry.nbytes, entry.extents)
            account.plane = "memory"
            return [SendToConsumer(peer, ack, account=account)]
        account.plane = ack.plane = "zmq"
        if codec != NONE:
            self.counts[f"codec_{codec}"] += 1
            account.codec = ack.codec = grant.codec = codec
            grant.chunk = aligned_chunk(codec, entry.dtype, entry.shape, grant.chunk)
            return [SendToConsumer(peer, ack, account=account), *self._push(grant, entry)]
        if entry.nbytes <= min(grant.credit, grant.chunk):
            grant.sent = entry.nbytes
            whole = Span(entry, 0, entry.nbytes)
            return [SendToConsumer(peer, ack, whole, grant.pin, account=account)]
        return [SendToConsumer(peer, ack, account=account), *self._push(grant, entry)]

    def _push(self, grant: Grant, entry: Entry) -> list[Effect]:
        effects: list[Effect] = []
        while grant.sent < entry.nbytes:
            nbytes = min(grant.chunk, entry.nbytes - grant.sent)
            if nbytes > grant.credit:
                break
            chunk = XferChunk(grant.req.session_id, grant.req.xfer_id, grant.sent, nbytes)
            payload = Span(entry, grant.sent, nbytes)
            effects.append(
                SendToConsumer(
                    grant.peer, chunk, payload, grant.pin, grant.codec, account=grant.account
                )
            )
            grant.sent += nbytes
            grant.credit -= nbytes
        return effects

    def _granted_to(self, peer: bytes) -> int:
        return len(self._of_peer.get(peer, ())) - self._parking.held_by(peer)

    def _keep(self, key: GrantKey, grant: Grant) -> None:
        # What the gate has read is the larger part of a request, and not needed any more.
        grant.req = structs.replace(grant.req, fingerprint={}, compatibility_hash="", ticket="")
        self._grants[key] = grant
        self._of_peer.setdefault(grant.peer, set()).add(key)

    def _drop(self, key: GrantKey) -> Grant:
        grant = self._grants.pop(key)
        if grant.state is GrantState.PARKED:
            self._parking.remove(key)
        self._leases.cancel(key)
        keys = self._of_peer[grant.peer]
        keys.discard(key)
        if not keys:
            del self._of_peer[grant.peer]
        return grant

    def _end(self, key: GrantKey, event: str) -> list[Effect]:
        grant = self._drop(key)
        grant.move(event)
        if grant.entry is None:
            return []
        grant.account.outcome = event
        return [EndGrant(grant.entry, grant.pin, grant.account)]

    def _refuse(self, grant: Grant, refusal: _Refusal) -> SendToConsumer:
        grant.move("refused")
        return self._nack(grant, refusal)

    def _nack(self, grant: Grant, refusal: _Refusal) -> SendToConsumer:
        req = grant.req
        self.counts[f"nack_{refusal.status.name.removeprefix('NACK_').lower()}"] += 1
        ack = XferAck(mm_hash=req.mm_hash, status=refusal.status, session_id=req.session_id)
        if req.planes or req.credit_bytes:
            ack.xfer_id = req.xfer_id
            ack.message, ack.factor = refusal.message[:MAX_TEXT_CHARS], refusal.factor
            ack.traceback = refusal.traceback[-MAX_TEXT_CHARS:]
        return SendToConsumer(grant.peer, ack)


def _key(peer: bytes, message: XferReq | XferCredit | XferDone) -> GrantKey:
    # Consumers that name no session must not end each other's grants.
    return message.session_id or f"peer/{peer.hex()}", message.mm_hash


@dataclass(frozen=True, slots=True)
class _Refusal:
    status: XferStatus
    message: str
    factor: str = ""
    traceback: str = ""
