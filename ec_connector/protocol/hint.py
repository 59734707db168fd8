# SPDX-License-Identifier: Apache-2.0
"""The line by which a router names an item that a request will ask for, and what becomes of it.

One JSON object a line: the item's ``key``, and of its announcement what a fetch needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ec_connector.announcement import read_announcement
from ec_connector.errors import ItemMissingError, MismatchError
from ec_connector.protocol.local import FetchItem

MAX_LINE_BYTES: Final = 8192
"""Longer lines are not written, and not read."""

OUTCOMES: Final = ("fetched", "failed", "made_way", "here", "no_room", "stranger", "malformed")
"""What becomes of a hint: there before an engine asked; not to be had; given up for room that an
engine needed; here, or on its way, already; too many, or too large; its producer would be one
connection too many, or has to be looked up by name; no hint at all."""

_FIELDS: Final = ("peer_host", "peer_port", "size_bytes", "shape", "dtype", "ticket")


def hint_lines(params: Mapping[str, Any]) -> list[bytes]:
    """A line, with its end, for each item of ``ec_transfer_params`` that can be fetched."""
    lines = []
    for key, entry in params.items():
        if not isinstance(entry, dict) or not (entry.get("peer_host") and entry.get("peer_port")):
            continue
        hint = {"key": key, **{name: entry[name] for name in _FIELDS if name in entry}}
        try:
            line = msgspec.json.encode(hint) + b"\n"
        except (UnicodeEncodeError, OverflowError, RecursionError):  # an encoder may say anything
            continue
        if len(line) <= MAX_LINE_BYTES:
            lines.append(line)
    return lines


def read_hint(line: bytes, seconds: float) -> FetchItem:
    """The item that a line names, to be had within ``seconds``.

    Raises:
        MismatchError: it is no such line.
    """
    if len(line) > MAX_LINE_BYTES:
        raise MismatchError(f"a line of over {MAX_LINE_BYTES} bytes")
    try:
        hint = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MismatchError(f"not JSON: {error}") from error
    if not isinstance(hint, dict):
        raise MismatchError("not a JSON object")
    key = hint.pop("key", None)
    if not isinstance(key, str):  # not shown: it may be nested as deep as it could be read
        raise MismatchError("no key")
    try:
        return read_announcement(key, hint, seconds)
    except ItemMissingError as error:
        raise MismatchError(str(error)) from error
