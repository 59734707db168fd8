# SPDX-License-Identifier: Apache-2.0
"""Asking a producer's agent what it is, over the network and as a consumer dials it."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from statistics import median

import msgspec
import zmq

from ec_connector.agent.peers import Down, PeerSockets, Refused, Up
from ec_connector.agent.reactor import Reactor
from ec_connector.agent.receive import has_message
from ec_connector.codecs.choice import EXACT, LOSS
from ec_connector.config import Settings
from ec_connector.curve import load_keys
from ec_connector.errors import PeerUnreachableError, WireError
from ec_connector.protocol.addresses import AllowList
from ec_connector.protocol.effects import Address
from ec_connector.protocol.fingerprint import Identity, agree
from ec_connector.protocol.local import State
from ec_connector.protocol.messages import (
    EC_CONNECTOR_VERSION,
    MAX_BODY_BYTES,
    XferPing,
    XferPong,
    decode_to_consumer,
    encode,
)
from ec_connector.protocol.texts import harmless
from ec_connector.protocol.tickets import Tickets
from ec_connector.ticket_file import load_tickets

_BUDGET = 64


class Reply(msgspec.Struct, frozen=True):
    """What came back: seconds until the connection stood, and of each round trip after that."""

    address: str
    connected: float
    round_trips: list[float]
    pong: XferPong

    @property
    def round_trip(self) -> float:
        """The median, in seconds."""
        return median(self.round_trips)


class Fit(msgspec.Struct, frozen=True):
    """Whether an agent of this host could use the peer; ``factor`` names what differs."""

    agent_pid: int
    factor: str = ""
    here: str = ""
    there: str = ""


def ping(address: Address, settings: Settings, count: int, timeout: float) -> Reply:
    """Ask ``count`` times, one after the other, all within ``timeout`` seconds.

    ``curve_keys``, ``ticket_key`` and ``allow_peers`` of the settings hold as for a consumer.

    Raises:
        ConfigError: a key file cannot be used.
        PeerUnreachableError: it does not answer in time, or may not be dialled; the text says
            how far it went.
    """
    keys = load_keys(Path(settings.curve_keys)) if settings.curve_keys else None
    tickets = load_tickets(settings.ticket_key)
    allowed = AllowList.parse(settings.allow_peers)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
    reactor = Reactor()
    asking = _Asking(address, tickets)
    peers = PeerSockets(context, reactor, allowed, MAX_BODY_BYTES, asking.read, keys)
    try:
        peers.open(address)
        until = time.monotonic() + timeout
        while len(asking.round_trips) < count:
            left = until - time.monotonic()
            if left <= 0:
                raise PeerUnreachableError(asking.why_not(timeout))
            reactor.turn(0 if peers.pending() else int(left * 1000) + 1)
            for change in peers.changes():
                if isinstance(change, Refused):
                    raise PeerUnreachableError(change.message)
                if isinstance(change, Up):
                    asking.up = time.monotonic()
                elif isinstance(change, Down):
                    asking.up = asking.sent_at = 0.0
            if asking.up and not asking.sent_at and len(asking.round_trips) < count:
                peers.send(address, asking.next())
    finally:
        peers.close_all()
        context.destroy(linger=0)
    if asking.pong is None:
        raise PeerUnreachableError(asking.why_not(timeout))
    connected = asking.first_up - asking.began
    return Reply(str(address), connected, asking.round_trips, asking.pong)


class _Asking:
    """One question at a time, and what came back."""

    def __init__(self, address: Address, tickets: Tickets | None) -> None:
        self._address = address
        self._tickets = tickets
        self._seq = 0
        self.began = time.monotonic()
        self.first_up = 0.0
        self.up = 0.0
        self.sent_at = 0.0
        self.round_trips: list[float] = []
        self.pong: XferPong | None = None

    def next(self) -> bytes:
        """The next ping; another number each time, so that no old answer counts."""
        self.first_up = self.first_up or self.up
        self._seq = secrets.randbits(62)
        ticket = self._tickets.sign_ping(self._seq) if self._tickets is not None else ""
        self.sent_at = time.monotonic()
        return encode(XferPing(self._seq, ticket))

    def read(self, _address: Address, dealer: zmq.Socket[bytes]) -> None:
        """Take in what the peer says; what is no answer to the last ping is nothing."""
        for _ in range(_BUDGET):  # a peer that never stops must not hide that the time is over
            if not has_message(dealer):
                return
            frames = dealer.recv_multipart()
            try:
                message = decode_to_consumer(frames[1]) if len(frames) == 2 else None
            except WireError:
                continue
            if isinstance(message, XferPong) and message.seq == self._seq and self.sent_at:
                self.round_trips.append(time.monotonic() - self.sent_at)
                self.sent_at, self.pong = 0.0, message

    def why_not(self, timeout: float) -> str:
        """How far it went."""
        if not self.first_up:
            return (
                f"no connection to {self._address} within {timeout:g} s: nobody listens there, or "
                "only one side has curve_keys"
            )
        return (
            f"{self._address} was connected and did not answer within {timeout:g} s: it is "
            "stopped, or no agent, or one that knows no ping yet"
        )


def fits(pong: XferPong, agents: list[State]) -> list[Fit]:
    """The peer beside agents of this host that know what they are."""
    theirs = Identity(pong.compatibility_hash, {LOSS: EXACT} | pong.fingerprint)
    found = []
    for agent in agents:
        if not agent.factors and not agent.compatibility_hash:
            continue
        mine = Identity(agent.compatibility_hash, {LOSS: EXACT} | agent.factors)
        difference = agree(mine, theirs)
        if pong.connector_version != EC_CONNECTOR_VERSION:
            difference = "wire version", str(EC_CONNECTOR_VERSION), str(pong.connector_version)
        factor, here, there = difference or ("", "", "")
        found.append(Fit(agent.agent_pid, harmless(factor), here, harmless(there)))
    return found
