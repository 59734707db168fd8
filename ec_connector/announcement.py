# SPDX-License-Identifier: Apache-2.0
"""What ``Consumer.fetch`` is given, checked: it may have travelled anywhere since it was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ec_connector.errors import ItemMissingError, MismatchError
from ec_connector.protocol.local import FetchItem
from ec_connector.protocol.messages import MAX_HASH_CHARS, MAX_RANK
from ec_connector.protocol.tickets import MAX_TICKET_CHARS

_Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct):
    """The fields of an announcement that a fetch needs. Others may be there."""

    peer_port: Annotated[int, Meta(ge=1, le=65535)]
    size_bytes: _Size
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[list[_Size], Meta(max_length=MAX_RANK)]
    peer_host: Annotated[str, Meta(max_length=253)]
    ticket: Annotated[str, Meta(max_length=MAX_TICKET_CHARS)] | None = None


def key_fault(key: object) -> str:
    """What is wrong with a key; empty when nothing is."""
    if not isinstance(key, str):
        return f"key={key!r:.80} is {type(key).__name__}; give text"
    if len(key) > MAX_HASH_CHARS:
        return f"a key of over {MAX_HASH_CHARS} characters: {key!r:.80}..."
    try:
        key.encode()
    except UnicodeEncodeError:
        return f"key={key!r:.80} holds half of a character, which no message can carry"
    return ""


def read_announcement(key: str, announcement: Mapping[str, Any], seconds: float) -> FetchItem:
    """The item that an announcement names, to be had within ``seconds``.

    Raises:
        ItemMissingError: it names no address, because the item had no room.
        MismatchError: key or announcement is malformed; the text names the field.
    """
    if fault := key_fault(key):
        raise MismatchError(fault)
    if not isinstance(announcement, Mapping):
        raise MismatchError(
            f"the announcement of {key!r} is {type(announcement).__name__}; "
            "give the dict that put returned"
        )
    if not announcement.get("peer_host"):
        raise ItemMissingError(f"{key!r} is announced without an address: its producer had no room")
    try:
        entry = msgspec.convert(dict(announcement), _Entry, strict=False)
        if not entry.peer_host.isprintable():
            raise msgspec.ValidationError("unprintable characters - at `$.peer_host`")
        (entry.dtype + (entry.ticket or "")).encode()
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise MismatchError(f"the announcement of {key!r} is unusable: {error}") from error
    return FetchItem(
        key=str(key),
        timeout_ms=max(1, int(seconds * 1000)),
        peer_host=entry.peer_host,
        peer_port=entry.peer_port,
        nbytes=entry.size_bytes,
        dtype=entry.dtype,
        shape=entry.shape,
        ticket=entry.ticket or "",
    )
