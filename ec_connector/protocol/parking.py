# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for a save: how many may, and how many of one peer.

Rule: who comes first may have all places. When none is left, a peer that holds fewer takes one of
the peer that holds most, whose newest request is told to come again. So shares become even, and one
that comes late finds room however much the others ask for.
"""

from __future__ import annotations

from ec_connector.errors import InternalError
from ec_connector.protocol.deadlines import Deadlines

GrantKey = tuple[str, str]
"""Session (or peer without one) and ``mm_hash``."""


class Parking:
    """At most ``places`` requests, found by item, by deadline and counted by peer."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._peer_of: dict[GrantKey, bytes] = {}
        self._held: dict[bytes, dict[GrantKey, None]] = {}
        self._waiting_for: dict[str, set[GrantKey]] = {}
        self._until: Deadlines[GrantKey] = Deadlines()

    def __len__(self) -> int:
        return len(self._peer_of)

    def full(self) -> bool:
        """Whether somebody must give way to a further request."""
        return len(self) >= self._places

    def held_by(self, peer: bytes) -> int:
        """How many requests of this peer wait."""
        return len(self._held.get(peer, ()))

    def gives_way_to(self, peer: bytes) -> GrantKey | None:
        """The request that must go for one of this peer; None: this peer's share is used up."""
        most = max(self._held.values(), key=len, default={})
        if len(most) < len(self._held.get(peer, ())) + 2:
            return None  # an exchange would only turn the tables
        return next(reversed(most))

    def add(self, key: GrantKey, peer: bytes, until: float) -> None:
        """Let a request wait until this time."""
        self._peer_of[key] = peer
        self._held.setdefault(peer, {})[key] = None
        self._waiting_for.setdefault(key[1], set()).add(key)
        self._until.set(key, until)

    def remove(self, key: GrantKey) -> None:
        """It waits no more."""
        peer = self._peer_of.pop(key)
        held = self._held[peer]
        del held[key]
        if not held:
            del self._held[peer]
        waiting = self._waiting_for[key[1]]
        waiting.discard(key)
        if not waiting:
            del self._waiting_for[key[1]]
        self._until.cancel(key)

    def waiting_for(self, mm_hash: str) -> list[GrantKey]:
        """Who waits for this item, in a fixed order."""
        return sorted(self._waiting_for.get(mm_hash, ()))

    def items(self) -> list[str]:
        """Items that somebody waits for."""
        return list(self._waiting_for)

    def due(self, now: float) -> list[GrantKey]:
        """Those that have waited long enough; the caller removes each."""
        return self._until.due(now)

    def next(self) -> float | None:
        """When the next of them has."""
        return self._until.next()

    def validate(self, parked: set[GrantKey]) -> None:
        """Raise InternalError unless exactly these wait, and all indexes say so."""
        waiting = {key for keys in self._waiting_for.values() for key in keys}
        if not parked == set(self._peer_of) == waiting or len(self._until) != len(parked):
            raise InternalError("parked requests and their indexes differ")
        held = {key: peer for peer, keys in self._held.items() for key in keys}
        if held != self._peer_of or not all(self._held.values()):
            raise InternalError("parked requests are not what their peers are said to hold")
