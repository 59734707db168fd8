# SPDX-License-Identifier: Apache-2.0
"""Whether what is here, or what a producer offers, is what a client asked for."""

from __future__ import annotations

from msgspec.structs import replace

from ec_connector.codecs.choice import NONE
from ec_connector.pool.blocks import Entry
from ec_connector.protocol.fetch import Fetch
from ec_connector.protocol.local import FetchItem
from ec_connector.protocol.messages import (
    MAX_HASH_CHARS,
    MAX_RANK,
    XferAck,
    XferChunk,
    XferStatus,
)


def fits(entry: Entry, item: FetchItem) -> bool:
    """Whether an entry of the pool is the item. Without a producer named, whatever is here is."""
    if not item.peer_host:
        return True
    have = (entry.nbytes, entry.dtype, tuple(entry.shape))
    return have == (item.nbytes, item.dtype, tuple(item.shape))


def same_source(one: FetchItem, other: FetchItem) -> bool:
    """Whether two wishes are for the same item of the same producer, whatever their time."""
    return replace(one, timeout_ms=0) == replace(other, timeout_ms=0)


def unservable(item: FetchItem) -> tuple[str, str]:
    """Why no producer could have such an item: reason and text; both empty if one could."""
    if item.nbytes < 0 or len(item.shape) > MAX_RANK or min(item.shape, default=0) < 0:
        text = f"{item.nbytes} bytes of shape {item.shape[: MAX_RANK + 1]} are no item"
        return "mismatch", text
    if len(item.key) > MAX_HASH_CHARS:
        return "missing", f"a key of over {MAX_HASH_CHARS} characters is not served"
    return "", ""


def ack_fault(ack: XferAck, item: FetchItem, codecs: tuple[str, ...]) -> str:
    """What is wrong with an OK ack for this item; empty when nothing is, or it is not OK."""
    sent = (ack.nbytes, ack.dtype, ack.shape)
    due = (item.nbytes, item.dtype, item.shape)
    if ack.status is not XferStatus.OK:
        return ""
    if sent != due:
        return f"the producer holds {sent} (bytes, dtype, shape) where {due} was announced"
    if ack.codec and (ack.codec == NONE or ack.codec not in codecs):
        return f"the producer packs with {ack.codec!r}, which was not offered"
    return ""


def plane_fault(ack: XferAck, planes: list[str]) -> str:
    """What is wrong with the plane of an OK ack; empty when nothing is."""
    if ack.plane not in ("", "zmq", "memory"):
        return f"the producer chose the plane {ack.plane!r}, which was not asked for"
    if ack.plane == "memory" and (ack.region is None or "memory" not in planes):
        return "the producer offers memory that it does not name, or that was not asked for"
    return ""


def in_order(chunk: XferChunk, fetch: Fetch) -> bool:
    """Whether this is the run of bytes that comes next, and the item has room for it."""
    end = chunk.offset + chunk.nbytes
    return chunk.offset == fetch.came and chunk.nbytes > 0 and end <= fetch.room().nbytes


def may_unpack(chunk: XferChunk, fetch: Fetch, most: int) -> bool:
    """Whether a packed run may be kept until it is unpacked.

    What that takes is bounded here: a run is no longer than was asked for (``most`` bytes), its
    packed form shorter than the run, and all that waits to be unpacked within the credit.
    """
    asked_for = chunk.codec == fetch.codec and chunk.nbytes <= most
    shorter = chunk.packed_nbytes < chunk.nbytes
    return asked_for and shorter and chunk.offset + chunk.nbytes <= fetch.credited
