# SPDX-License-Identifier: Apache-2.0
"""What a consumer knows of its connections to producers, and which fetches use each.

A connection is retried for as long as it is remembered. One that is away for
longer than ``connect_timeout`` fails what uses it, and new users at once; one
that nobody uses, or that stays away, is forgotten after ``PEER_IDLE_SECONDS``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from ec_connector.errors import InternalError
from ec_connector.protocol.addresses import is_host_name
from ec_connector.protocol.deadlines import Deadlines
from ec_connector.protocol.effects import Address, Connect, Disconnect, Effect
from ec_connector.protocol.flow import Flow
from ec_connector.protocol.messages import MAX_CREDIT_BYTES

PEER_IDLE_SECONDS: Final = 60.0


class PeerState(enum.Enum):
    """What is known of the connection to a producer."""

    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class _Peer:
    state: PeerState
    since: float
    flow: Flow
    streams: bool = False
    users: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Absence:
    """A producer that is away for ``seconds``: ``users`` fail. ``over``: forget it, too."""

    address: Address
    seconds: float
    users: list[str]
    over: bool


class Connections:
    """The connections of one consumer. Keys are those of the fetches that use them.

    Args:
        connect_timeout: seconds a producer may be away before its fetches fail.
        max_peers: connections held at one time.
        lanes: connections to one producer.
        window: payload bytes under way to begin with, on each.
    """

    def __init__(self, connect_timeout: float, max_peers: int, lanes: int, window: int) -> None:
        self.max_peers = max_peers
        self._lanes = lanes
        self._window = window
        self._connect_timeout = connect_timeout
        self._peers: dict[Address, _Peer] = {}
        self._clock: Deadlines[Address] = Deadlines()

    def __len__(self) -> int:
        return len(self._peers)

    def full_for(self, address: Address) -> bool:
        """Whether this would be one connection too many."""
        return address not in self._peers and len(self._peers) >= self.max_peers

    def spare_for(self, address: Address) -> bool:
        """Whether a fetch that nobody asked for may use this connection.

        It may not take the last ones, nor have a name looked up: both could be missed later.
        """
        if address in self._peers:
            return True
        return 2 * len(self._peers) < self.max_peers and not is_host_name(address.host)

    def lane(self, address: Address) -> Address:
        """The connection to this producer that the next fetch should use.

        The least used one; another one where all are in use, for bytes that wait in a socket
        behind others. Only where bytes come through sockets, and where one is connected.
        """
        lanes = [address._replace(lane=number) for number in range(self._lanes)]
        known = [lane for lane in lanes if lane in self._peers]
        ready = [lane for lane in known if self._peers[lane].state is PeerState.UP] or known
        best = min(ready, key=lambda lane: len(self._peers[lane].users), default=address)
        peer = self._peers.get(best)
        if peer is None or not (peer.users and peer.streams and peer.state is PeerState.UP):
            return best
        if len(known) == len(lanes) or len(self._peers) >= self.max_peers:
            return best
        return next(lane for lane in lanes if lane not in self._peers)

    def connected(self, address: Address) -> bool:
        """Whether messages get there now."""
        peer = self._peers.get(address)
        return peer is not None and peer.state is PeerState.UP

    def streamed(self, address: Address, seconds: float) -> Flow:
        """Bytes come through this connection's socket; the answer to the question took so long."""
        peer = self._peers[address]
        peer.streams = True
        peer.flow.answered(seconds)
        return peer.flow

    def flow(self, address: Address) -> Flow:
        """The window of a connection in use."""
        return self._peers[address].flow

    def use(self, address: Address, key: str, now: float) -> list[Effect]:
        """A fetch needs this producer from now on."""
        peer = self._peers.get(address)
        effects: list[Effect] = []
        if peer is None:
            flow = Flow(self._window, MAX_CREDIT_BYTES)
            peer = self._peers[address] = _Peer(PeerState.CONNECTING, now, flow)
            self._clock.set(address, now + self._connect_timeout)
            effects.append(Connect(address))
        elif peer.state is PeerState.UP:
            self._rest(address, now)
        peer.users.add(key)
        return effects

    def leave(self, address: Address, key: str) -> None:
        """A fetch needs it no more."""
        if (peer := self._peers.get(address)) is not None:
            peer.users.discard(key)

    def absence(self, address: Address, now: float) -> float | None:
        """Seconds that it has been away, if that is too long to wait; else None."""
        peer = self._peers.get(address)
        if peer is None or peer.state is not PeerState.DOWN:
            return None
        away = now - peer.since
        return away if away >= self._connect_timeout else None

    def up(self, address: Address, now: float) -> list[str]:
        """It is connected. Returns the fetches whose question a lost connection took along."""
        peer = self._peers.get(address)
        if peer is None:
            return []
        again = peer.state is PeerState.DOWN
        peer.state, peer.since = PeerState.UP, now
        self._rest(address, now)
        return sorted(peer.users) if again else []

    def down(self, address: Address, now: float) -> list[str]:
        """It is not connected, or not any more. Returns the fetches that this is news for."""
        peer = self._peers.get(address)
        if peer is None or peer.state is PeerState.DOWN:
            return []
        if peer.state is PeerState.UP:
            peer.since = now
        peer.state = PeerState.DOWN
        self._clock.set(address, peer.since + self._connect_timeout)
        return sorted(peer.users)

    def users(self, address: Address) -> list[str]:
        """The fetches that use it."""
        return sorted(self._peers[address].users) if address in self._peers else []

    def forget(self, address: Address) -> list[Effect]:
        """Close the connection, if there is one."""
        if self._peers.pop(address, None) is None:
            return []
        self._clock.cancel(address)
        return [Disconnect(address)]

    def due(self, now: float) -> list[Absence]:
        """Producers that are away for too long, or that nobody uses."""
        found = []
        for address in self._clock.due(now):
            peer = self._peers[address]
            self._rest(address, now)
            if peer.state is not PeerState.UP:
                peer.state = PeerState.DOWN
                self._clock.set(address, peer.since + PEER_IDLE_SECONDS)
                over = now >= peer.since + PEER_IDLE_SECONDS
                found.append(Absence(address, now - peer.since, sorted(peer.users), over))
            elif not peer.users:
                found.append(Absence(address, 0.0, [], True))
        return found

    def next(self) -> float | None:
        """When :meth:`due` has something next."""
        return self._clock.next()

    def validate(self) -> None:
        """Raise InternalError if a connection would never be given up."""
        if len(self._clock) != len(self._peers):
            raise InternalError("a peer without a clock would never be given up")

    def _rest(self, address: Address, now: float) -> None:
        self._clock.set(address, now + PEER_IDLE_SECONDS)
