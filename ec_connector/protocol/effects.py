# SPDX-License-Identifier: Apache-2.0
"""What the state machines want done. They decide; the agent's loop does.

Machines take events and the time, and return a list of these. They own no
socket, thread or clock, so a test can run a producer and a consumer face to
face and hold, drop or reorder what passes between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ec_connector.pool.blocks import Entry
from ec_connector.protocol.account import Account
from ec_connector.protocol.local import ToClient
from ec_connector.protocol.messages import (
    RegionRef,
    XferAck,
    XferChunk,
    XferCredit,
    XferDone,
    XferPong,
    XferReq,
)


class Address(NamedTuple):
    """A producer agent's address as it was announced; ``lane``: which connection to it."""

    host: str
    port: int
    lane: int = 0

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``offset`` to ``offset + nbytes`` of a pool entry."""

    entry: Entry
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SendToConsumer:
    """Send a message to the peer of this identity, with pool bytes behind it if any.

    ``grant`` names the pin under which the bytes may be read until they are out.
    With a ``codec`` the bytes of a chunk are to be packed first, if they shrink; chunks
    of one grant leave in order. What it takes is added to the ``account``.
    """

    peer: bytes
    message: XferAck | XferChunk | XferPong
    payload: Span | None = None
    grant: str = ""
    codec: str = ""
    account: Account | None = None


@dataclass(frozen=True, slots=True)
class EndGrant:
    """Unpin, once every frame sent under this grant has left the process; book its account."""

    entry: Entry
    grant: str
    account: Account


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection to a producer; answered by peer_up, peer_down or peer_refused."""

    address: Address


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection; nothing more is expected from that peer."""

    address: Address


@dataclass(frozen=True, slots=True)
class SendToProducer:
    """Send a message to the producer at this address."""

    address: Address
    message: XferReq | XferCredit | XferDone
    account: Account | None = None


@dataclass(frozen=True, slots=True)
class CopyFromPeer:
    """Same-host plane: copy the peer's blocks into ours, if the proof is right, then check the
    generation.

    Answered by ``copied``.
    """

    address: Address
    xfer_id: int
    region: RegionRef
    extents: tuple[tuple[int, int], ...]
    generation: int
    proof: bytes
    target: Entry


@dataclass(frozen=True, slots=True)
class Unpack:
    """Make the rows again that ``data`` packs. Answered by ``unpacked``.

    Nothing is written into the pool before that: ``unpacking_to`` says where to.
    """

    xfer_id: int
    chunk: XferChunk
    data: memoryview
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopCopy:
    """Do not go on with a copy, or with unpacking: its target is not the fetch's any more."""

    xfer_id: int


@dataclass(frozen=True, slots=True)
class Book:
    """A transfer is over, and what it cost is known."""

    account: Account


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to a client of this agent."""

    client: bytes
    message: ToClient


Effect = (
    SendToConsumer
    | EndGrant
    | Connect
    | Disconnect
    | SendToProducer
    | CopyFromPeer
    | Unpack
    | StopCopy
    | Book
    | Tell
)
