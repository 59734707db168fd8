# SPDX-License-Identifier: Apache-2.0
"""The agent: one loop that owns the clock, every socket and the pool's bookkeeping.

Everything is decided by the machines in ``protocol/``; here their events come in
and their effects go out. One thread: whatever blocks would stop every transfer,
so nothing here does.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterable

import zmq

from ec_connector.agent.ahead import Hints
from ec_connector.agent.auth import Gate
from ec_connector.agent.clients import Clients, Handlers
from ec_connector.agent.kind import Kind
from ec_connector.agent.lifeline import Lifelines
from ec_connector.agent.listen import advertised_host, bind_peers, exposure
from ec_connector.agent.packing import Packer, Unpacker, Workers, codecs_here
from ec_connector.agent.peers import Down, PeerSockets, Refused, Up
from ec_connector.agent.reactor import Reactor
from ec_connector.agent.receive import has_message, take_answer, take_request
from ec_connector.agent.registration import Registration
from ec_connector.agent.same_host import SameHostPlane
from ec_connector.agent.transmit import Transmitter, span_views
from ec_connector.codecs.choice import NONE
from ec_connector.config import AgentOptions
from ec_connector.errors import WireError
from ec_connector.pool.blocks import BlockPool, Entry
from ec_connector.pool.region import Region
from ec_connector.protocol.addresses import DEFAULT_ALLOW, AllowList
from ec_connector.protocol.ahead import Ahead
from ec_connector.protocol.consumer import OWNER as FETCH_OWNER
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
    StopCopy,
    Tell,
    Unpack,
)
from ec_connector.protocol.fetch import AHEAD
from ec_connector.protocol.ledger import Ledger
from ec_connector.protocol.local import (
    AskState,
    AskStats,
    DropAll,
    Fetch,
    Hello,
    Loaded,
    Release,
    Reserve,
    Saved,
    SaveFailed,
    State,
    Stats,
    StepDone,
    ToAgent,
    Welcome,
)
from ec_connector.protocol.messages import (
    XferAck,
    XferCredit,
    XferPing,
    XferPong,
    XferReq,
    XferStatus,
    encode,
)
from ec_connector.protocol.producer import ProducerMachine
from ec_connector.protocol.saves import Lost, SaveDesk
from ec_connector.ticket_file import load_tickets

logger = logging.getLogger("vllm.ec_connector.agent")

_BUDGET = 64
"""Messages taken from one socket before the others have their turn."""
_LONGEST_MS = 60 * 60 * 1000
"""The loop wakes at least this often while something has a deadline; a poll takes 24 days at most.
"""
_SWEEP_MS = 5
"""How often frames still leaving are looked at while a grant waits to end."""


class Agent:
    """One agent. :meth:`run` serves until a signal or the owner's death.

    Raises:
        RegionError: the pool's memory cannot be had.
        AgentStartError: the port is taken, or the address cannot be bound.
        ConfigError: a file of ``curve_keys``, ``curve_allow``, ``ticket_key`` or ``proxy_token``
            cannot be used, or none of ``codecs``.
    """

    def __init__(self, options: AgentOptions) -> None:
        settings = options.settings
        self.agent_id = secrets.token_hex(8)
        self._context = zmq.Context(settings.lanes)  # one I/O thread each
        # A peer takes three: the connection, and both ends of what watches it.
        limit = self._context.get(zmq.SOCKET_LIMIT)
        self._context.max_sockets = min(64 + 3 * settings.max_peers, limit)
        self._reactor = Reactor()
        self._lifelines = Lifelines(self._reactor, self._process_ended)
        self._owner = options.owner_pid
        # First of all, so that an owner that dies during a long start is noticed at its end.
        self._orphan = bool(self._owner) and not self._lifelines.watch(self._owner)
        self._gate = Gate(self._context, self._reactor, settings) if settings.curve_keys else None
        self.router, self.port = bind_peers(
            self._context,
            settings.bind_host,
            settings.port,
            self._gate.guard if self._gate is not None else None,
        )
        if warning := exposure(settings):
            logger.warning(warning)
        handlers = Handlers(self._welcome, self._from_client, self._clients_gone)
        self.clients = Clients(self._reactor, self._lifelines, handlers)
        self.host = advertised_host(settings.bind_host, settings.advertise_host)
        self.region = Region.create(settings.pool_size, settings.block_size)
        self.pool = BlockPool(self.region.num_blocks, self.region.block_bytes)
        self.pool.on_free = self._on_free
        self.pool.on_ready = self._on_ready
        self._codecs = codecs = codecs_here(settings.codecs)
        self._kind = Kind(options.identity, codecs)
        self._planes = planes = tuple(settings.planes)
        tickets = load_tickets(settings.ticket_key)
        allowed = settings.allow_peers
        if tickets is not None and allowed == list(DEFAULT_ALLOW):
            allowed = ["*"]  # whoever a ticket names; what is never dialled stays so
        self.ledger = Ledger(settings.link, frozenset({self.host}))
        self._reasons: dict[bytes, dict[str, dict[str, int]]] = {}
        self.transmitter = Transmitter(self.router, self.region, self.pool, self.ledger.book)
        self.producer = ProducerMachine(
            self.pool,
            self._kind.identity,
            self.region.ref,
            secret=self.region.secret,
            planes=planes,
            lease=settings.lease,
            max_parked=settings.max_parked,
            own_session=self.agent_id,
            tickets=tickets,
            announced_at=(self.host, self.port),
            codecs=codecs,
            behind=self.transmitter.behind,
        )
        self.consumer = ConsumerMachine(
            self.pool,
            self._kind.identity,
            self.agent_id,
            planes=planes,
            chunk_bytes=settings.chunk_size,
            window_bytes=settings.window,
            connect_timeout=settings.connect_timeout,
            max_peers=settings.max_peers,
            lanes=settings.lanes,
            tickets=tickets,
            codecs=codecs,
        )
        self.ahead = Ahead(self.pool, self.consumer, settings.fetch_timeout)
        self.desk = SaveDesk(self.pool)
        self.peers = PeerSockets(
            self._context,
            self._reactor,
            AllowList.parse(allowed),
            max(settings.chunk_size, 64 * 1024),
            self._read_producer,
            self._gate.credentials if self._gate is not None else None,
        )
        self.same_host = SameHostPlane(self.region)
        self._workers = Workers(self._reactor)
        self.packer = Packer(self.region, self._workers, self.transmitter.packed_leaving)
        self.unpacker = Unpacker(self._workers)
        self._wants_packed = codecs[0] != NONE
        self._sends_as_is: set[tuple[str, int]] = set()
        self._fetched: set[str] = set()
        self._stopping = False
        self._dropped_frames = 0
        self._reactor.add(self.router, self._read_consumers)
        self._registration = (
            Registration(settings, options.serves, self.agent_id) if settings.proxy_url else None
        )
        told = settings.proxy_url and "decode" in options.serves
        self._hints = (
            Hints(settings, options.serves, self.agent_id, self._reactor, self._hinted)
            if told
            else None
        )

    # ── life ─────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """End :meth:`run` after the current turn. Callable from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until told to stop."""
        wake_out, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        self._reactor.add(wake_out, lambda: None)  # what it woke for is seen by the loop below
        if self._registration is not None:
            self._registration.start()
        if self._hints is not None:
            self._hints.start()
        try:
            while not (self._stopping or self._orphan):
                self.turn(self._patience())
        finally:
            signal.set_wakeup_fd(previous)
            self._reactor.remove(wake_out)
            os.close(wake_in)
            os.close(wake_out)

    def turn(self, timeout_ms: int | None) -> None:
        """Wait for something to happen, and deal with all of it."""
        self._reactor.turn(timeout_ms)
        now = time.monotonic()
        for change in self.peers.changes():
            if isinstance(change, Up):
                self._do(self.consumer.peer_up(change.address, now), now)
            elif isinstance(change, Down):
                self.same_host.forget(change.address)
                self._do(self.consumer.peer_down(change.address, now), now)
            elif isinstance(change, Refused):
                logger.warning("peer=%s refused: %s", change.address, change.message)
                self._do(self.consumer.peer_refused(change.address, change.message), now)
        for copied in self.same_host.work():
            now = time.monotonic()
            self._do(self.consumer.copied(copied.xfer_id, copied.fault, now), now)
        now = time.monotonic()
        self._codecs_worked(now)
        self._pass_on(now)
        self._do(self.producer.tick(now), now)
        self._do(self.consumer.tick(now), now)
        self.transmitter.sweep(now)
        self._do(self.ahead.make_way(now), now)
        # Last, when all that this turn frees is free: nothing else may happen for long.
        self._do(self.consumer.room(now), now)

    def close(self) -> None:
        """Leave the router, close every socket and give the memory back."""
        if self._registration is not None:
            self._registration.close()
        if self._hints is not None:
            self._hints.close()
        self._workers.close()
        self.clients.close()
        self.peers.close_all()
        self.same_host.close()
        self._lifelines.close()
        self._context.destroy(linger=0)
        self.region.close()

    def _patience(self) -> int | None:
        if self.peers.pending() or self.same_host.busy():
            return 0
        waits = [self.producer.deadline(), self.consumer.deadline()]
        now = time.monotonic()
        left = [
            min(max(0, int((when - now) * 1000) + 1), _LONGEST_MS)
            for when in waits
            if when is not None
        ]
        if self.transmitter.busy() or self.packer.held_up():
            left.append(_SWEEP_MS)
        return min(left, default=None)

    # ── clients of this host ─────────────────────────────────────────────────

    def _welcome(self, hello: Hello) -> Welcome:
        self._kind.join(hello)
        self.producer.identity = self.consumer.identity = self._kind.identity
        return Welcome(
            agent_id=self.agent_id,
            agent_pid=os.getpid(),
            region=self.region.ref,
            peer_host=self.host,
            peer_port=self.port,
        )

    def _from_client(self, client: bytes, owner: bytes, message: ToAgent) -> None:
        now = time.monotonic()
        if isinstance(message, Fetch):
            for item in message.items:
                if client not in self.clients:
                    return  # its end was noticed at the item before; nobody would release this one
                self._do(self.consumer.fetch(client, item, now), now)
        elif isinstance(message, Release):
            for key in message.keys:
                self._do(self.consumer.release(client, key, now), now)
        elif isinstance(message, Loaded):
            for key in message.keys:
                self._do(self.consumer.loaded(client, key), now)
        elif isinstance(message, Reserve):
            self._do(self.ahead.make_way_for(message, now), now)
            self.clients.tell(client, self.desk.reserve(owner, message, now))
        elif isinstance(message, Saved):
            for key in self.desk.saved(message, now):
                self._do(self.producer.saved(key, now), now)
                self._do(self.consumer.saved(key, now), now)
        elif isinstance(message, SaveFailed):
            logger.error("mm_hash=%s save failed: %s", message.key, message.message)
            self._lost(self.desk.failed(message), now)
        elif isinstance(message, StepDone):
            self._lost(self.desk.step_done(owner, message.step), now)
        elif isinstance(message, DropAll):
            self._reweighed(client, message.factors, now)
        elif isinstance(message, AskStats):
            if message.reasons:
                self._reasons[client] = message.reasons
            self.clients.tell(client, Stats(self.stats(), message.seq, self.ledger.links()))
        elif isinstance(message, AskState):
            self.clients.tell(client, self._state(message.after))

    def _hinted(self, lines: list[bytes]) -> None:
        now = time.monotonic()
        for line in lines:
            self._do(self.ahead.hint(line, now), now)

    def _reweighed(self, client: bytes, factors: dict[str, str], now: float) -> None:
        dropped = self.pool.drop_all()
        logger.warning("the model's weights changed: %d items dropped", dropped)
        self._do(self.producer.drop_all(), now)
        self._do(self.consumer.drop_all(), now)
        if factors:
            self._kind.become(factors)
            self.producer.identity = self.consumer.identity = self._kind.identity
            self.clients.became(client, factors, self._kind.objection)

    def _process_ended(self, pid: int) -> None:
        if pid == self._owner:
            logger.info("owner process %d ended", pid)
            self._orphan = True
        self.clients.process_ended(pid)

    def _clients_gone(self, clients: list[bytes], owners: list[bytes]) -> None:
        now = time.monotonic()
        for client in clients:
            self._reasons.pop(client, None)
            self._do(self.consumer.client_gone(client, now), now)
        for owner in owners:
            self._lost(self.desk.owner_gone(owner), now)

    def _lost(self, lost: Iterable[Lost], now: float) -> None:
        for item in lost:
            self._do(self.producer.lost(item.key, item.message, item.traceback), now)
            self._do(self.consumer.lost(item.key), now)

    # ── peers ────────────────────────────────────────────────────────────────

    def _read_consumers(self) -> None:
        now = time.monotonic()
        for _ in range(_BUDGET):
            if not has_message(self.router):
                return
            try:
                peer, message, header, host = take_request(
                    self.router, self._gate.welcome if self._gate is not None else None
                )
            except WireError as error:
                self._drop("consumer", error)
                continue
            if isinstance(message, XferReq):
                asked = self.producer.asked(peer, message, now, header=header, host=host)
                self._do(asked, now)
            elif isinstance(message, XferCredit):
                self._do(self.producer.credited(peer, message, now, header=header), now)
            elif isinstance(message, XferPing):
                self._do(self.producer.pinged(peer, message), now)
            else:
                self._do(self.producer.done(peer, message, header=header), now)

    def _read_producer(self, address: Address, dealer: zmq.Socket[bytes]) -> None:
        for _ in range(_BUDGET):
            if dealer.closed or not has_message(dealer):
                return
            try:
                message, payload, header = take_answer(
                    dealer, self.region, lambda m: self.consumer.landing(address, m)
                )
            except WireError as error:
                self._drop(str(address), error)
                continue
            now = time.monotonic()
            if isinstance(message, XferAck):
                self._note_codec(address, message)
                came = payload if isinstance(payload, int | None) else 0
                effects = self.consumer.answered(address, message, came, now, header=header)
            elif isinstance(message, XferPong):
                self._drop(str(address), WireError("a pong, and nobody here pinged"))
                continue
            else:
                effects = self.consumer.arrived(address, message, payload, now, header=header)
            self._do(effects, now)

    def _drop(self, peer: str, error: WireError) -> None:
        self._dropped_frames += 1
        if self._dropped_frames & (self._dropped_frames - 1) == 0:  # 1, 2, 4, 8 ... times
            logger.warning(
                "peer=%s message dropped (%d so far): %s", peer, self._dropped_frames, error
            )

    def _note_codec(self, address: Address, ack: XferAck) -> None:
        peer = (address.host, address.port)
        as_is = ack.status is XferStatus.OK and ack.plane == "zmq" and not ack.codec
        if self._wants_packed and as_is and ack.nbytes and peer not in self._sends_as_is:
            self._sends_as_is.add(peer)
            logger.warning("peer=%s has none of our codecs: it sends rows as they are", address)

    def _codecs_worked(self, now: float) -> None:
        """Send what was packed, and take in what was unpacked, by threads meanwhile."""
        # One at a time: what one brings about can end the grant or the fetch of the next.
        while (packing := self.packer.next()) is not None:
            effect, packed = packing
            if packed is None:
                sent = self.transmitter.send(effect)
            else:
                sent = self.transmitter.send_packed(effect, packed)
            if not sent:
                self._do(self.producer.peer_gone(effect.peer), now)
        while (unpacking := self.unpacker.next()) is not None:
            job, unpacked = unpacking
            fault, seconds = (
                (unpacked, 0.0) if isinstance(unpacked, str) else ("", unpacked.seconds)
            )
            span = self.consumer.unpacking_to(job.xfer_id, job.chunk)
            if span is not None and not isinstance(unpacked, str):
                rows = unpacked.value
                for view in span_views(self.region, span):
                    view[:] = rows[: len(view)]
                    rows = rows[len(view) :]
            effects = self.consumer.unpacked(job.xfer_id, job.chunk, fault, now, seconds=seconds)
            self._do(effects, now)

    # ── effects ──────────────────────────────────────────────────────────────

    def _do(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, Tell) and effect.client == AHEAD:
                self._do(self.ahead.told(effect.message, now), now)
            elif isinstance(effect, Tell):
                self.clients.tell(effect.client, effect.message)
            elif isinstance(effect, SendToConsumer) and effect.codec:
                self.packer.start(effect)
            elif isinstance(effect, SendToConsumer):
                if not self.transmitter.send(effect):
                    self._do(self.producer.peer_gone(effect.peer), now)
            elif isinstance(effect, EndGrant):
                self.transmitter.end(effect, self.packer.stop(effect.grant), now)
            elif isinstance(effect, SendToProducer):
                body = encode(effect.message)
                if self.peers.send(effect.address, body) and effect.account is not None:
                    effect.account.header_out += len(body)
            elif isinstance(effect, Book):
                self.ledger.book(effect.account, now)
            elif isinstance(effect, Connect):
                self.peers.open(effect.address)
            elif isinstance(effect, Disconnect):
                self.peers.close(effect.address)
                self.same_host.forget(effect.address)
            elif isinstance(effect, CopyFromPeer):
                self.same_host.start(effect)
            elif isinstance(effect, Unpack):
                self.unpacker.start(effect)
            elif isinstance(effect, StopCopy):
                self.same_host.stop(effect.xfer_id)
                self.unpacker.stop(effect.xfer_id)

    # ── the pool ─────────────────────────────────────────────────────────────

    def _pass_on(self, now: float) -> None:
        """Tell the producer's half what became of items that the consumer's half fetched."""
        while self._fetched:
            key = self._fetched.pop()
            entry = self.pool.get(key)
            if entry is None:
                self._do(self.producer.lost(key, ""), now)
            elif entry.ready:
                self._do(self.producer.saved(key, now), now)

    def _on_ready(self, entry: Entry) -> None:
        self.region.set_generation(entry.extents[0][0], entry.generation)
        if entry.owner == FETCH_OWNER:
            self._fetched.add(entry.key)

    def _on_free(self, entry: Entry) -> None:
        # Before the blocks can be written again, so that a reader that looks afterwards sees it.
        self.region.set_generation(entry.extents[0][0], 0)
        if entry.owner == FETCH_OWNER and entry.saving:
            self._fetched.add(entry.key)

    def _state(self, after: int) -> State:
        reasons: dict[str, Counter[str]] = {}
        for told in self._reasons.values():
            for name, counts in told.items():
                reasons.setdefault(name, Counter()).update(counts)
        identity = self._kind.identity
        return State(
            agent_pid=os.getpid(),
            address=f"{Address(self.host, self.port)}",
            compatibility_hash=identity.compatibility_hash,
            factors=dict(identity.factors),
            planes=list(self._planes),
            codecs=list(self._codecs),
            values=self.stats(),
            links=self.ledger.links(),
            reasons={name: dict(counts) for name, counts in reasons.items()},
            peers=self.ledger.peers(),
            transfers=self.ledger.recent(after),
        )

    def stats(self) -> dict[str, int]:
        """Counters since the start and gauges of this moment, by name."""
        usage = self.pool.usage()
        values = {
            "blocks": usage.num_blocks,
            "blocks_free": usage.free,
            "blocks_pinned": usage.pinned,
            "entries": usage.entries,
            "bytes_sent": self.transmitter.bytes_sent,
            "bytes_saved_by_codecs": self.transmitter.bytes_saved,
            "clients": len(self.clients),
            "frames_dropped": self._dropped_frames,
        }
        if self._gate is not None:
            values.update(self._gate.counts())
        for machine in (self.producer, self.consumer, self.ahead):
            values.update(machine.gauges())
        counted = (self.producer, self.consumer, self.desk, self.ahead)
        for counts in (one.counts for one in counted):
            values.update(counts)
        return values
