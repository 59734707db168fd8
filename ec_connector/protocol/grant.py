# SPDX-License-Identifier: Apache-2.0
"""One request at the producer's half: its states, and what is known of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from ec_connector.pool.blocks import Entry
from ec_connector.protocol.account import Account
from ec_connector.protocol.messages import XferReq
from ec_connector.states import Table


class GrantState(enum.Enum):
    """Where a request stands."""

    ASKED = "asked"
    PARKED = "parked until the item is saved"
    GRANTED = "granted: the item is pinned"
    ENDED = "ended"


_ENDS = {
    "asked again": GrantState.ENDED,
    "done": GrantState.ENDED,
    "peer gone": GrantState.ENDED,
}
GRANT: Final = Table(
    "grant",
    GrantState.ASKED,
    {
        GrantState.ASKED: {
            "granted": GrantState.GRANTED,
            "parked": GrantState.PARKED,
            "refused": GrantState.ENDED,
        },
        GrantState.PARKED: {
            "granted": GrantState.GRANTED,
            "refused": GrantState.ENDED,
            "too late": GrantState.ENDED,
        }
        | _ENDS,
        GrantState.GRANTED: {"sent whole": GrantState.ENDED, "lease over": GrantState.ENDED}
        | _ENDS,
    },
)


@dataclass(slots=True)
class Grant:
    """A request that is parked (no ``entry`` yet) or granted (pinned as ``pin``).

    ``chunk``, ``credit`` and ``sent`` are bytes of the item; ``codec`` empty: sent as they are.
    """

    peer: bytes
    req: XferReq
    account: Account
    state: GrantState = GrantState.ASKED
    entry: Entry | None = None
    pin: str = ""
    chunk: int = 0
    credit: int = 0
    sent: int = 0
    codec: str = ""

    def move(self, event: str) -> None:
        """Something happened to it. Raises InternalError where that cannot be."""
        self.state = GRANT.after(self.state, event, self.req.mm_hash)

    def is_of(self, peer: bytes, xfer_id: int) -> bool:
        """Whether a message of this peer, for this attempt, is about it."""
        return self.peer == peer and self.req.xfer_id == xfer_id
