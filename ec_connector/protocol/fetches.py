# SPDX-License-Identifier: Apache-2.0
"""The consumer's fetches: one per item, and which attempt at it is the current one."""

from __future__ import annotations

from collections.abc import Iterator

from ec_connector.errors import InternalError
from ec_connector.protocol.effects import Address
from ec_connector.protocol.fetch import Fetch, FetchState
from ec_connector.protocol.messages import XferAck, XferChunk

_WITHOUT_ROOM = (FetchState.LOCAL, FetchState.MEETING, FetchState.ROOM)


class Fetches:
    """All fetches under way, by item and by number of the current attempt (``xfer_id``).

    Args:
        session_id: of this consumer; messages of another one are about no fetch here.
    """

    def __init__(self, session_id: str) -> None:
        self._session = session_id
        self._by_key: dict[str, Fetch] = {}
        self._by_xfer: dict[int, Fetch] = {}
        self._xfers = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Fetch]:
        """Every fetch; they may end meanwhile."""
        return iter(tuple(self._by_key.values()))

    def __getitem__(self, key: str) -> Fetch:
        return self._by_key[key]

    def get(self, key: str) -> Fetch | None:
        """The fetch of this item."""
        return self._by_key.get(key)

    def add(self, fetch: Fetch) -> None:
        """A fetch begins."""
        self._by_key[fetch.item.key] = fetch

    def remove(self, key: str) -> Fetch:
        """A fetch ends: what still arrives for it is about nothing any more."""
        fetch = self._by_key.pop(key)
        self._by_xfer.pop(fetch.xfer_id, None)
        return fetch

    def renumber(self, fetch: Fetch) -> None:
        """From now on only what answers the next attempt is about this fetch."""
        self._by_xfer.pop(fetch.xfer_id, None)
        self._xfers += 1
        fetch.xfer_id = self._xfers
        if fetch.entry is not None:
            self._by_xfer[fetch.xfer_id] = fetch

    def attempt(self, xfer_id: int, state: FetchState) -> Fetch | None:
        """The fetch whose current attempt this is, if it is in that state."""
        fetch = self._by_xfer.get(xfer_id)
        return fetch if fetch is not None and fetch.state is state else None

    def match(self, address: Address, message: XferAck | XferChunk) -> Fetch | None:
        """The fetch that a producer's message is about."""
        fetch = self._by_xfer.get(message.xfer_id)
        if fetch is None or message.session_id != self._session or fetch.address != address:
            return None
        if isinstance(message, XferAck) and message.mm_hash != fetch.item.key:
            return None
        return fetch

    def validate(self) -> None:
        """Raise InternalError if the tables disagree with each other."""
        for key, fetch in self._by_key.items():
            if not fetch.waiters:
                raise InternalError(f"nobody waits for the fetch of {key!r}")
            if (fetch.state in _WITHOUT_ROOM) != (fetch.entry is None):
                raise InternalError(f"the fetch of {key!r} is {fetch.state} with {fetch.entry}")
        if len(self._by_xfer) != sum(f.entry is not None for f in self._by_key.values()):
            raise InternalError("transfers and fetches differ in number")
