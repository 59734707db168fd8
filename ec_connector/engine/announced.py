# SPDX-License-Identifier: Apache-2.0
"""Reads ``ec_transfer_params``, which comes from a client and may hold anything."""

from __future__ import annotations

from typing import Any

from ec_connector.dtypes import DTypeError, nbytes_of
from ec_connector.engine.claims import Source
from ec_connector.protocol.messages import MAX_RANK
from ec_connector.protocol.tickets import MAX_TICKET_CHARS


class BadAnnouncement(ValueError):
    """The entry for an item cannot be used; the text says why."""


def read_source(params: Any, key: str, rows: int, dtype: str) -> Source | None:
    """Where an item is announced; None if it is not.

    ``rows`` and ``dtype`` are what the request's prompt and this model demand.

    Raises:
        BadAnnouncement: the entry is malformed, or of another size or dtype.
    """
    entry = params.get(key) if isinstance(params, dict) else None
    if not isinstance(entry, dict) or not entry.get("peer_host"):
        return None
    host, port = entry["peer_host"], _whole(entry, "peer_port")
    # Half a surrogate pair is text to Python, but nothing that a message could hold.
    spelled = isinstance(host, str) and len(host) <= 253 and host.isprintable()
    if not spelled or not 0 < port < 65536:
        raise BadAnnouncement("peer_host and peer_port are no address")
    nbytes, shape = _whole(entry, "size_bytes"), entry.get("shape")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_whole, shape)):
        raise BadAnnouncement("shape is not a list of sizes")
    announced = entry.get("dtype", dtype)
    if not isinstance(announced, str):  # whose text could be as deep and long as the request
        raise BadAnnouncement("dtype is not the name of one")
    if announced != dtype:
        text = f"it is announced as {announced[:40]!r}, but this model's dtype is {dtype}"
        raise BadAnnouncement(text)
    if len(shape) != 2 or shape[0] != rows:
        raise BadAnnouncement(f"it is announced with shape {shape}, but {rows} rows are expected")
    try:
        expected = nbytes_of(shape, dtype)
    except DTypeError as error:
        raise BadAnnouncement(str(error)) from error
    if nbytes != expected:
        raise BadAnnouncement(f"{nbytes} bytes are announced, but shape {shape} has {expected}")
    ticket = entry.get("ticket", "")
    if not isinstance(ticket, str) or len(ticket) > MAX_TICKET_CHARS or not ticket.isascii():
        raise BadAnnouncement("ticket is not the text of one")
    return Source(host, port, nbytes, tuple(shape), ticket)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _whole(entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or not _is_whole(value):
        raise BadAnnouncement(f"{name} is missing or no number")
    return value
