# SPDX-License-Identifier: Apache-2.0
"""The consumer's half of a transfer: who wants which item, and where it stands.

Rules:

1. One fetch per item, however many clients want it. Each client is answered
   exactly once, ``Ready`` or ``Failed``, by its own deadline.
2. Room in the pool is reserved before the producer is asked, so every byte that
   arrives has its place; bytes of another transfer, another size or out of
   order are thrown away, never written.
3. Each attempt has its own ``xfer_id``. What arrives for an older one is ignored,
   and a grant that nobody here wants is handed back with ``done``.
4. A broken connection restarts the fetches that used it, until the peer has been
   away for ``connect_timeout``; a peer that stays away fails new fetches at once.
5. A client's items stay pinned until it releases them or is gone.
6. Announcements come from clients, and one that names other content for a key costs nobody
   what is here: that makes way only once the announced producer is connected, so after ticket,
   address and keys were found right.
7. A fetch that no client asked for (``ahead.py``) ends where a client asks for the key otherwise.

The states of a fetch are the table ``FETCH``.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from ec_connector.codecs.choice import NONE
from ec_connector.errors import InternalError, ItemTooLargeError, PoolFullError
from ec_connector.pool.blocks import BlockPool, Entry
from ec_connector.protocol.account import (
    CONSUMER,
    DELIVERED,
    LOADING,
    PACKING,
    RECEIVING,
    WAITING,
    Account,
)
from ec_connector.protocol.connections import Connections
from ec_connector.protocol.deadlines import Deadlines
from ec_connector.protocol.delivered import Delivered
from ec_connector.protocol.effects import (
    Address,
    Book,
    CopyFromPeer,
    Effect,
    SendToProducer,
    Span,
    StopCopy,
    Tell,
    Unpack,
)
from ec_connector.protocol.fetch import AHEAD, MOVING, Fetch, FetchState, Waiter
from ec_connector.protocol.fetches import Fetches
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import Failed, FetchItem, Ready
from ec_connector.protocol.messages import (
    XferAck,
    XferChunk,
    XferCredit,
    XferDone,
    XferReq,
    XferStatus,
)
from ec_connector.protocol.producer import MAX_PARK_SECONDS
from ec_connector.protocol.texts import harmless
from ec_connector.protocol.tickets import Tickets
from ec_connector.protocol.wanted import (
    ack_fault,
    fits,
    in_order,
    may_unpack,
    plane_fault,
    same_source,
    unservable,
)

OWNER: Final = b"fetch"
"""Who reserved an entry that a fetch is filling."""
MAX_BACKOFF: Final = 1.0

_NACK_REASON = {
    XferStatus.NACK_MISSING: "missing",
    XferStatus.NACK_INCOMPAT: "incompatible",
    XferStatus.NACK_VERSION: "version",
    XferStatus.NACK_INTERNAL: "remote_error",
}


class ConsumerMachine:
    """Decides what to ask of producers, and answers this agent's clients.

    Args:
        pool: the agent's pool; fetched items land and stay in it.
        identity: what this engine is; goes with every request.
        session_id: names this consumer at producers; unique per agent process.
        planes: planes this consumer can use, best first.
        chunk_bytes: largest run of payload in one message.
        window_bytes: payload in flight per transfer, to begin with (see ``Flow``).
        connect_timeout: seconds a peer may be away before its fetches fail.
        max_peers: connections held at one time.
        lanes: connections to one peer.
        tickets: with them only what carries a valid ticket is dialled.
        codecs: what payload may be packed with over ZMQ, best first; ``none``: it may come
            as it is.
    """

    def __init__(
        self,
        pool: BlockPool,
        identity: Identity,
        session_id: str,
        *,
        planes: tuple[str, ...] = ("zmq",),
        chunk_bytes: int = 1 << 20,
        window_bytes: int = 8 << 20,
        connect_timeout: float = 2.0,
        max_peers: int = 256,
        lanes: int = 1,
        tickets: Tickets | None = None,
        codecs: tuple[str, ...] = (NONE,),
    ) -> None:
        self._pool = pool
        self.identity = identity
        self._session = session_id
        self._planes = list(planes)
        self._chunk = chunk_bytes
        self._tickets = tickets
        self._codecs = codecs
        self._fetches = Fetches(session_id)
        self._peers = Connections(connect_timeout, max_peers, lanes, window_bytes)
        self._delivered = Delivered(pool)
        self._waiting_for_room: dict[str, None] = {}
        self._waiters: Deadlines[tuple[str, bytes]] = Deadlines()
        self._retries: Deadlines[str] = Deadlines()
        self.counts: Counter[str] = Counter()

    # ── what clients say ─────────────────────────────────────────────────────

    def fetch(self, client: bytes, item: FetchItem, now: float) -> list[Effect]:
        """A client wants an item pinned in the pool."""
        self.counts["fetches"] += 1
        return [*self._supersede(item), *self._fetch(client, item, now)]

    def _fetch(self, client: bytes, item: FetchItem, now: float) -> list[Effect]:
        waiter = Waiter(now + item.timeout_ms / 1000.0, now)
        entry = self._pool.get(item.key)
        if entry is not None and entry.ready and fits(entry, item):
            return [self._ready(client, entry, waiter, now, "pool", "")]
        running = self._fetches.get(item.key)
        if running is not None:
            if not self._same_item(running, item):
                text = "the same item is being fetched with another size, dtype or shape"
                return [self._failed(client, item, "mismatch", text)]
            running.waiters[client] = waiter
            self._waiters.set((item.key, client), waiter.deadline)
            return []
        reason, text = unservable(item)
        if reason:
            return [self._failed(client, item, reason, text)]
        if entry is None and not item.peer_host:
            return [self._failed(client, item, "missing", "not in this engine's pool")]
        if item.peer_host and not self._has_ticket(item):
            self.counts["tickets_refused"] += 1
            text = "the announcement carries no ticket that a producer of this fleet signed"
            return [self._failed(client, item, "peer_refused", text)]
        address = self._peers.lane(Address(item.peer_host, item.peer_port))
        account = Account(item.key, item.peer_host, str(address), CONSUMER, now)
        fetch = Fetch(item, address, account)
        fetch.waiters[client] = waiter
        self._fetches.add(fetch)
        self._waiters.set((item.key, client), waiter.deadline)
        if entry is not None and not entry.ready:
            fetch.move("saved here")
            return []
        if self._peers.full_for(address):
            text = f"{self._peers.max_peers} producers are connected already (max_peers)"
            return self._fail(item.key, "peer_refused", text)
        effects = self._peers.use(address, item.key, now)
        away = self._peers.absence(address, now)
        if away is not None:
            return self._fail(item.key, "peer_unreachable", _no_connection(address, away))
        if entry is not None and not self._peers.connected(address):
            fetch.move("other content is here")
            return effects
        return [*effects, *self._replace(item.key, now)]

    def objection(self, item: FetchItem) -> str:
        """Why this item should not be fetched before a client asks for it; empty: it may be.

        A counted label: ``"here"``, ``"no_room"`` or ``"stranger"``.
        """
        if self._pool.get(item.key) is not None or self._fetches.get(item.key) is not None:
            return "here"
        if self._waiting_for_room:
            return "no_room"
        address = self._peers.lane(Address(item.peer_host, item.peer_port))
        return "" if self._peers.spare_for(address) else "stranger"

    def waits_for_room(self) -> bool:
        """Whether a fetch waits for blocks to become free."""
        return bool(self._waiting_for_room)

    def _supersede(self, item: FetchItem) -> list[Effect]:
        """End a fetch that no client asked for, where one now asks for something else."""
        running = self._fetches.get(item.key)
        if running is None or not running.unasked or same_source(running.item, item):
            return []
        return self._fail(item.key, "mismatch", "a client asks for another item", hand_back=True)

    def _has_ticket(self, item: FetchItem) -> bool:
        return self._tickets is None or self._tickets.verify(
            item.ticket,
            item.key,
            item.peer_host,
            item.peer_port,
            item.nbytes,
            item.dtype,
            item.shape,
        )

    def release(self, client: bytes, key: str, now: float) -> list[Effect]:
        """A client needs an item no longer, whether it has it or still waits for it."""
        effects: list[Effect] = []
        fetch = self._fetches.get(key)
        if fetch is not None and fetch.waiters.pop(client, None) is not None:
            self._waiters.cancel((key, client))
            if not fetch.waiters:
                effects += self._finish(key, "unwanted")
        accounts = self._delivered.release(client, key, now)
        return [*effects, *map(Book, accounts), *self.room(now)]

    def loaded(self, client: bytes, key: str) -> list[Effect]:
        """A client has copied an item out of the pool, and holds it for further use."""
        return [*map(Book, self._delivered.loaded(client, key))]

    def client_gone(self, client: bytes, now: float) -> list[Effect]:
        """A client's process ended: nothing is pinned or fetched for it any more."""
        effects: list[Effect] = []
        waits = (fetch.item.key for fetch in self._fetches if client in fetch.waiters)
        for key in dict.fromkeys([*self._delivered.keys(client), *waits]):
            effects += self.release(client, key, now)
        return effects

    # ── what the pool says ───────────────────────────────────────────────────

    def saved(self, key: str, now: float) -> list[Effect]:
        """An item that this engine itself was saving is ready."""
        fetch = self._fetches.get(key)
        entry = self._pool.get(key)
        if fetch is None or fetch.state is not FetchState.LOCAL:
            return []
        if entry is None or not entry.ready:
            return []
        if not fits(entry, fetch.item):
            return self._fail(key, "mismatch", "what was saved here is of another size or shape")
        return self._deliver(key, entry, "pool", now)

    def lost(self, key: str) -> list[Effect]:
        """An item that this engine itself was saving will not come."""
        fetch = self._fetches.get(key)
        if fetch is None or fetch.state is not FetchState.LOCAL:
            return []
        return self._fail(key, "missing", "its save here was given up")

    def room(self, now: float) -> list[Effect]:
        """Blocks may have become free: start what waited for them, oldest first."""
        effects: list[Effect] = []
        while self._waiting_for_room:
            key = next(iter(self._waiting_for_room))
            effects += self._start(key, now)
            if key in self._waiting_for_room:
                break
        return effects

    def drop_all(self) -> list[Effect]:
        """The model's weights changed: what is on its way is not wanted any more."""
        effects: list[Effect] = []
        for fetch in self._fetches:
            text = "the model's weights changed meanwhile"
            effects += self._fail(fetch.item.key, "missing", text, hand_back=True)
        return effects

    # ── what producers say ───────────────────────────────────────────────────

    def landing(self, address: Address, message: XferAck | XferChunk) -> Span | int | None:
        """Where the payload behind this message belongs; None: throw it away.

        A number: packed, and so long. Called before the payload is read; ``answered`` or
        ``arrived`` follows.
        """
        fetch = self._fetches.match(address, message)
        if fetch is None or fetch.entry is None:
            return None
        if isinstance(message, XferAck):
            if fetch.state is not FetchState.ASKED or message.codec:
                return None
            fault = ack_fault(message, fetch.item, self._codecs)
            return None if fault else Span(fetch.entry, 0, fetch.entry.nbytes)
        if fetch.state is not FetchState.RECEIVING or not in_order(message, fetch):
            return None
        if not message.codec:
            return Span(fetch.entry, message.offset, message.nbytes)
        return message.packed_nbytes if may_unpack(message, fetch, self._chunk) else None

    def answered(
        self, address: Address, ack: XferAck, payload: int | None, now: float, *, header: int = 0
    ) -> list[Effect]:
        """A producer answered. ``payload``: length of what came behind the ack, None if nothing.

        ``header``: bytes of the ack itself.
        """
        fetch = self._fetches.match(address, ack)
        if fetch is None or fetch.entry is None:
            return self._hand_back(address, ack)
        account = fetch.account
        account.header_in += header
        account.payload_in += payload or 0
        if fetch.state is not FetchState.ASKED:
            return []  # the same answer again: handing it back would end the grant in use
        key = fetch.item.key
        if ack.status is XferStatus.NACK_NOT_READY:
            return self._ask_later(key, now)
        if ack.status is not XferStatus.OK:
            reason = _NACK_REASON[ack.status]
            text = harmless(ack.message) or reason
            if ack.traceback:
                text += "\n" + harmless(ack.traceback, keep="\n\t")
            return self._fail(key, reason, text, harmless(ack.factor))
        fault = ack_fault(ack, fetch.item, self._codecs) or plane_fault(ack, self._planes)
        if fault:
            return [*self._hand_back(address, ack), *self._fail(key, "mismatch", fault)]
        account.plane = fetch.plane = ack.plane or "zmq"
        account.codec = fetch.codec = ack.codec
        account.turn(RECEIVING, now)
        if fetch.plane == "memory" and ack.region is not None:
            # A state of its own: bytes from elsewhere must not end a fetch whose copy goes on.
            fetch.move("memory shown")
            copy = CopyFromPeer(
                address=address,
                xfer_id=fetch.xfer_id,
                region=ack.region,
                extents=tuple(ack.extents),
                generation=ack.generation,
                proof=ack.proof,
                target=fetch.entry,
            )
            return [copy]
        if not ack.codec and self._codecs[0] != NONE:
            self.counts["codecs_declined"] += 1
            if NONE not in self._codecs and ack.nbytes:
                text = f"the producer has none of codecs={list(self._codecs)}; add 'none', or "
                text += "set codecs there"
                failed = self._fail(key, "incompatible", text, "codecs")
                return [*self._hand_back(address, ack), *failed]
        fetch.move("bytes come")
        self._peers.streamed(fetch.address, now - fetch.asked_at)
        fetch.window_began = now
        if payload is None:
            return []
        return self._landed(key, payload, fetch.entry.nbytes, now)

    def arrived(
        self,
        address: Address,
        chunk: XferChunk,
        payload: int | memoryview | None,
        now: float,
        *,
        header: int = 0,
    ) -> list[Effect]:
        """A chunk came. ``payload``: length of what came behind it, None if nothing.

        Where ``landing`` gave a number, and so many bytes came: those.
        """
        fetch = self._fetches.match(address, chunk)
        if fetch is None or fetch.state is not FetchState.RECEIVING:
            return []
        key = fetch.item.key
        fetch.account.header_in += header
        if isinstance(payload, memoryview):
            fetch.came += chunk.nbytes
            fetch.account.payload_in += payload.nbytes
            self.counts["packed_bytes_received"] += payload.nbytes
            entry = fetch.room()
            return [Unpack(fetch.xfer_id, chunk, payload, entry.dtype, entry.shape)]
        fetch.account.payload_in += payload or 0
        if payload == chunk.nbytes:
            fetch.came += payload
        return self._landed(key, payload or 0, chunk.nbytes, now)

    def unpacking_to(self, xfer_id: int, chunk: XferChunk) -> Span | None:
        """Where bytes unpacked meanwhile belong; None: they are not wanted any more."""
        fetch = self._fetches.attempt(xfer_id, FetchState.RECEIVING)
        if fetch is None:
            return None
        return Span(fetch.room(), chunk.offset, chunk.nbytes)

    def unpacked(
        self, xfer_id: int, chunk: XferChunk, fault: str, now: float, *, seconds: float = 0.0
    ) -> list[Effect]:
        """A chunk's bytes are where ``unpacking_to`` said, or could not be had (``fault``)."""
        fetch = self._fetches.attempt(xfer_id, FetchState.RECEIVING)
        if fetch is None:
            return []
        key = fetch.item.key
        fetch.account.add(PACKING, seconds)
        if fault:
            text = f"bytes {chunk.offset} to {chunk.offset + chunk.nbytes}, {chunk.codec}: {fault}"
            return self._fail(key, "mismatch", text, hand_back=True)
        self.counts["unpacked_bytes"] += chunk.nbytes
        return self._landed(key, chunk.nbytes, chunk.nbytes, now)

    def copied(self, xfer_id: int, fault: str, now: float) -> list[Effect]:
        """Same-host plane: the copy is done (``fault`` empty) or could not be had.

        A region that cannot be mapped, or was overwritten under the copy, is
        no loss: the item is asked for again over ZMQ.
        """
        fetch = self._fetches.attempt(xfer_id, FetchState.COPYING)
        if fetch is None:
            return []
        key = fetch.item.key
        if not fault:
            nbytes = fetch.room().nbytes
            fetch.account.payload_in += nbytes
            return self._landed(key, nbytes, nbytes, now)
        self.counts["memory_plane_refused"] += 1
        effects = self._done_effects(fetch)
        return [*effects, *self._ask(key, now, without="memory")]

    # ── what connections say ─────────────────────────────────────────────────

    def peer_up(self, address: Address, now: float) -> list[Effect]:
        """The connection is ready: ask for what a lost one took along."""
        effects: list[Effect] = []
        for key in self._peers.up(address, now):
            if self._fetches[key].state in (FetchState.ASKED, *MOVING):
                effects += self._ask(key, now)
        for key in self._peers.users(address):
            if self._fetches[key].state is FetchState.MEETING:
                effects += self._replace(key, now)
        return effects

    def peer_down(self, address: Address, now: float) -> list[Effect]:
        """The connection broke, or an attempt failed."""
        effects: list[Effect] = []
        for key in self._peers.down(address, now):
            fetch = self._fetches[key]
            if fetch.state in MOVING:
                effects += self._stop_copy(fetch)
                fetch.move("connection lost")
                fetch.account.turn(WAITING, now)
                fetch.came = fetch.received = 0
            self._fetches.renumber(fetch)
        return effects

    def peer_refused(self, address: Address, message: str) -> list[Effect]:
        """The address may not be dialled, or has no meaning."""
        effects: list[Effect] = []
        for key in self._peers.users(address):
            effects += self._fail(key, "peer_refused", message)
        return [*effects, *self._peers.forget(address)]

    # ── time ─────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> list[Effect]:
        """Whatever is due: deadlines, repeated questions, absent and idle peers."""
        effects: list[Effect] = []
        for key, client in self._waiters.due(now):
            effects += self._expire(key, client)
        for key in self._retries.due(now):
            effects += self._ask(key, now)
        for absence in self._peers.due(now):
            text = _no_connection(absence.address, absence.seconds)
            for key in absence.users:
                effects += self._fail(key, "peer_unreachable", text)
            if absence.over:
                effects += self._peers.forget(absence.address)
        return effects

    def deadline(self) -> float | None:
        """When :meth:`tick` has work next."""
        times = (self._waiters.next(), self._retries.next(), self._peers.next())
        return min((t for t in times if t is not None), default=None)

    def gauges(self) -> dict[str, int]:
        """Fetches under way and peers known at this moment."""
        return {
            "fetching": len(self._fetches),
            "waiting_for_room": len(self._waiting_for_room),
            "peers": len(self._peers),
        }

    def validate(self) -> None:
        """Raise InternalError if the tables disagree with each other."""
        self._fetches.validate()
        self._peers.validate()
        self._delivered.validate()
        for fetch in self._fetches:
            key = fetch.item.key
            remote = fetch.state is not FetchState.LOCAL
            if remote and key not in self._peers.users(fetch.address):
                raise InternalError(f"the fetch of {key!r} has no peer")
            if (fetch.state is FetchState.ROOM) != (key in self._waiting_for_room):
                raise InternalError(f"the fetch of {key!r} and the queue for room differ")

    # ── asking ───────────────────────────────────────────────────────────────

    def _replace(self, key: str, now: float) -> list[Effect]:
        """Start a fetch whose producer is allowed; what is here of other content makes way."""
        entry = self._pool.get(key)
        if entry is not None and not fits(entry, self._fetches[key].item):
            # A client-chosen identifier was used twice; ours is not what is wanted.
            self._pool.drop(key)
        return self._start(key, now)

    def _start(self, key: str, now: float) -> list[Effect]:
        fetch = self._fetches[key]
        item = fetch.item
        if self._pool.get(key) is not None:
            # While this fetch waited, the engine itself came to save the item.
            self._waiting_for_room.pop(key, None)
            fetch.move("saved here")
            self._peers.leave(fetch.address, key)
            return self.saved(key, now)
        try:
            fetch.entry = self._pool.reserve(
                key, item.nbytes, item.dtype, tuple(item.shape), owner=OWNER, step=0, now=now
            )
        except ItemTooLargeError as error:
            return self._fail(key, "pool_full", str(error))
        except PoolFullError:
            fetch.move("no room")
            self._waiting_for_room[key] = None
            return []
        self._waiting_for_room.pop(key, None)
        return self._ask(key, now)

    def _ask(self, key: str, now: float, without: str = "") -> list[Effect]:
        fetch = self._fetches[key]
        self._fetches.renumber(fetch)
        fetch.move("asks")
        fetch.account.turn(WAITING, now)
        fetch.start_over(self._peers.flow(fetch.address).window, now)
        patience = max(w.deadline for w in fetch.waiters.values()) - now
        req = XferReq(
            mm_hash=key,
            compatibility_hash=self.identity.compatibility_hash,
            session_id=self._session,
            xfer_id=fetch.xfer_id,
            fingerprint=dict(self.identity.factors),
            planes=[plane for plane in self._planes if plane != without],
            credit_bytes=fetch.window,
            chunk_bytes=self._chunk,
            timeout_ms=int(min(max(patience, 0.001), MAX_PARK_SECONDS) * 1000),
            ticket=fetch.item.ticket,
            codecs=[] if self._codecs == (NONE,) else list(self._codecs),
        )
        self.counts["requests_sent"] += 1
        return [SendToProducer(fetch.address, req, fetch.account)]

    def _ask_later(self, key: str, now: float) -> list[Effect]:
        fetch = self._fetches[key]
        fetch.move("not ready")
        self._retries.set(key, now + fetch.backoff)
        fetch.backoff = min(fetch.backoff * 2, MAX_BACKOFF)
        return []

    def _same_item(self, running: Fetch, item: FetchItem) -> bool:
        if not item.peer_host:
            return True  # asks for whatever this pool has; it checks the answer itself
        if running.state is FetchState.LOCAL:
            entry = self._pool.get(item.key)
            return entry is not None and fits(entry, item)
        mine = running.item
        return (mine.nbytes, mine.dtype, mine.shape) == (item.nbytes, item.dtype, item.shape)

    # ── receiving ────────────────────────────────────────────────────────────

    def _landed(self, key: str, payload: int, expected: int, now: float) -> list[Effect]:
        fetch = self._fetches[key]
        place = fetch.room()
        if payload != expected:
            text = f"{payload} payload bytes fit where {expected} were due"
            return self._fail(key, "mismatch", text, hand_back=True)
        fetch.received += payload
        self.counts["bytes_received"] += payload
        if fetch.received == place.nbytes:
            entry = self._pool.commit(key, place.generation, now)
            if entry is None:
                return self._fail(key, "missing", "dropped while it arrived", hand_back=True)
            # First, so that the account has it when a client gives the item back at once.
            done = self._done_effects(fetch)
            return [*done, *self._deliver(key, entry, fetch.plane, now)]
        credit = fetch.credit_due(payload, self._peers.flow(fetch.address), now)
        if not credit:
            return []
        message = XferCredit(self._session, key, fetch.xfer_id, credit)
        return [SendToProducer(fetch.address, message, fetch.account)]

    def _deliver(self, key: str, entry: Entry, plane: str, now: float) -> list[Effect]:
        fetch = self._fetches[key]
        fetch.entry = None  # no longer this fetch's to abandon
        peer = str(fetch.address) if plane != "pool" else ""
        if plane != "pool":
            fetch.account.nbytes = entry.nbytes
            fetch.account.turn(LOADING, now)
            # Who fetches ahead loads nothing: where an engine waits too, that one's load counts.
            loading = [client for client in fetch.waiters if client != AHEAD]
            self._delivered.charge(fetch.account, loading or [AHEAD])
        ready: list[Effect] = [
            self._ready(client, entry, waiter, now, plane, peer)
            for client, waiter in fetch.waiters.items()
        ]
        self._remove(key, "delivered")
        return ready

    def _ready(
        self, client: bytes, entry: Entry, waiter: Waiter, now: float, plane: str, peer: str
    ) -> Tell:
        self._delivered.add(client, entry, now)
        self.counts[f"ready_{plane}"] += 1
        message = Ready(
            key=entry.key,
            generation=entry.generation,
            extents=list(entry.extents),
            nbytes=entry.nbytes,
            dtype=entry.dtype,
            shape=list(entry.shape),
            plane=plane,
            peer=peer,
            elapsed_us=int((now - waiter.asked_at) * 1e6),
        )
        return Tell(client, message)

    # ── ending ───────────────────────────────────────────────────────────────

    def _expire(self, key: str, client: bytes) -> list[Effect]:
        fetch = self._fetches[key]
        waiter = fetch.waiters.pop(client)
        waited = waiter.deadline - waiter.asked_at
        reason = "pool_full" if fetch.state is FetchState.ROOM else "deadline"
        text = f"not there after {waited:.1f} s ({fetch.state.value})"
        tell = self._failed(client, fetch.item, reason, text)
        if fetch.waiters:
            return [tell]
        fetch.account.outcome = reason
        return [tell, *self._finish(key, "failed")]

    def _fail(
        self, key: str, reason: str, text: str, factor: str = "", *, hand_back: bool = False
    ) -> list[Effect]:
        fetch = self._fetches[key]
        fetch.account.outcome = reason
        told: list[Effect] = [
            self._failed(client, fetch.item, reason, text, factor) for client in fetch.waiters
        ]
        for client in fetch.waiters:
            self._waiters.cancel((key, client))
        fetch.waiters.clear()
        return [*told, *(self._finish(key, "failed") if hand_back else self._remove(key, "failed"))]

    def _failed(
        self, client: bytes, item: FetchItem, reason: str, text: str, factor: str = ""
    ) -> Tell:
        self.counts[f"failed_{reason}"] += 1
        peer = str(Address(item.peer_host, item.peer_port)) if item.peer_host else ""
        return Tell(client, Failed(item.key, reason, text, factor, peer))

    def _finish(self, key: str, event: str) -> list[Effect]:
        """Give a fetch up, telling the producer if it may hold a grant for us."""
        fetch = self._fetches[key]
        done = self._done_effects(fetch) if fetch.entry is not None else []
        return [*done, *self._remove(key, event)]

    def _remove(self, key: str, event: str) -> list[Effect]:
        fetch = self._fetches.remove(key)
        self._waiting_for_room.pop(key, None)
        self._retries.cancel(key)
        for client in fetch.waiters:
            self._waiters.cancel((key, client))
        stop: list[Effect] = []
        if fetch.entry is not None:
            # Only this agent's loop writes fetched bytes, and it carries out StopCopy first.
            self._pool.abandon(key, fetch.entry.generation)
            stop = self._stop_copy(fetch)
        self._peers.leave(fetch.address, key)
        no_transfer = fetch.state is FetchState.LOCAL or event == DELIVERED
        fetch.move(event)
        if no_transfer:
            return stop
        fetch.account.outcome = fetch.account.outcome or event
        return [*stop, Book(fetch.account)]

    def _stop_copy(self, fetch: Fetch) -> list[Effect]:
        under_way = fetch.state is FetchState.COPYING or fetch.came > fetch.received
        return [StopCopy(fetch.xfer_id)] if under_way else []

    def _done_effects(self, fetch: Fetch) -> list[Effect]:
        done = XferDone(self._session, fetch.item.key, fetch.xfer_id)
        return [SendToProducer(fetch.address, done, fetch.account)]

    def _hand_back(self, address: Address, ack: XferAck) -> list[Effect]:
        if ack.status is not XferStatus.OK or ack.session_id != self._session:
            return []
        return [SendToProducer(address, XferDone(self._session, ack.mm_hash, ack.xfer_id))]


def _no_connection(address: Address, seconds: float) -> str:
    return f"no connection to {address} for {seconds:.1f} s"
