# SPDX-License-Identifier: Apache-2.0
"""One fetch of the consumer's half: its states, and what is known of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from ec_connector.errors import InternalError
from ec_connector.pool.blocks import Entry
from ec_connector.protocol.account import Account
from ec_connector.protocol.effects import Address
from ec_connector.protocol.flow import Flow
from ec_connector.protocol.local import FetchItem
from ec_connector.states import Table

FIRST_BACKOFF: Final = 0.05
AHEAD: Final = b"ahead"
"""The client for which items are fetched that no engine has asked for yet; others have numbers."""


class FetchState(enum.Enum):
    """Where a fetch stands."""

    NEW = "new"
    LOCAL = "being saved here"
    MEETING = "other content is here: its producer must be connected first"
    ROOM = "waiting for room in the pool"
    ASKED = "asked"
    BACKOFF = "to be asked again"
    RECEIVING = "receiving"
    COPYING = "copying from the peer's memory"
    ENDED = "ended"


_ENDS = {"delivered": FetchState.ENDED, "failed": FetchState.ENDED, "unwanted": FetchState.ENDED}
_BEGINS = {
    "saved here": FetchState.LOCAL,
    "no room": FetchState.ROOM,
    "asks": FetchState.ASKED,
}
_LOST = {"connection lost": FetchState.ASKED, "asks": FetchState.ASKED}
FETCH: Final = Table(
    "fetch",
    FetchState.NEW,
    {
        FetchState.NEW: {"other content is here": FetchState.MEETING} | _BEGINS | _ENDS,
        FetchState.LOCAL: _ENDS,
        FetchState.MEETING: _BEGINS | _ENDS,
        FetchState.ROOM: _BEGINS | _ENDS,
        FetchState.ASKED: {
            "not ready": FetchState.BACKOFF,
            "bytes come": FetchState.RECEIVING,
            "memory shown": FetchState.COPYING,
            "asks": FetchState.ASKED,
        }
        | _ENDS,
        FetchState.BACKOFF: {"asks": FetchState.ASKED} | _ENDS,
        FetchState.RECEIVING: _LOST | _ENDS,
        FetchState.COPYING: _LOST | _ENDS,
    },
)
MOVING: Final = (FetchState.RECEIVING, FetchState.COPYING)


@dataclass(slots=True)
class Waiter:
    """A client that wants the item, until when and since when (seconds, monotonic)."""

    deadline: float
    asked_at: float


@dataclass(slots=True)
class Fetch:
    """One item on its way, for all clients that want it."""

    item: FetchItem
    address: Address
    account: Account
    state: FetchState = FetchState.NEW
    waiters: dict[bytes, Waiter] = field(default_factory=dict)
    entry: Entry | None = None
    xfer_id: int = 0
    came: int = 0
    """Bytes of the item whose messages are here, in order; the next one begins there."""
    received: int = 0
    """Those of them that are in the pool; the others are still being unpacked."""
    credited: int = 0
    """Bytes of the item that the producer may have sent by now."""
    codec: str = ""
    owed_credit: int = 0
    asked_at: float = 0.0
    window: int = 0
    window_began: float = 0.0
    window_received: int = 0
    backoff: float = FIRST_BACKOFF
    plane: str = ""

    def move(self, event: str) -> None:
        """Something happened to it. Raises InternalError where that cannot be."""
        self.state = FETCH.after(self.state, event, self.item.key)

    @property
    def unasked(self) -> bool:
        """Whether no engine has asked for it yet."""
        return self.waiters.keys() == {AHEAD}

    def start_over(self, window: int, now: float) -> None:
        """The item is asked for from its first byte on, with ``window`` bytes under way."""
        self.came = self.received = self.owed_credit = self.window_received = 0
        self.codec = ""
        self.asked_at = now
        self.window = self.credited = window

    def credit_due(self, nbytes: int, flow: Flow, now: float) -> int:
        """So many bytes more are in the pool; how many more the producer may send, if worth it."""
        self.owed_credit += nbytes
        self.window_received += nbytes
        if self.window_received >= self.window:
            window = flow.passed(self.window, now - self.window_began)
            self.owed_credit += window - self.window
            self.window, self.window_began, self.window_received = window, now, 0
        if self.owed_credit < self.window // 4:
            return 0
        due, self.owed_credit = self.owed_credit, 0
        self.credited += due
        return due

    def room(self) -> Entry:
        """The entry that the bytes go to. Raises InternalError where none is reserved."""
        if self.entry is None:
            raise InternalError(
                f"the fetch of {self.item.key!r} is {self.state.value} without room"
            )
        return self.entry
