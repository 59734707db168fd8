# SPDX-License-Identifier: Apache-2.0
"""JSON bodies of requests: read once, written out piece by piece.

An image of 20 MB is one long string in the body. It is kept once, by reference in each
request made from it, and never copied whole to be sent.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec

_LONG = 64 * 1024  # characters
_PIECE = 256 * 1024  # bytes


def parse(raw: bytes | bytearray) -> object:
    """The JSON value in a request's body.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    try:
        return msgspec.json.decode(raw)
    except msgspec.MsgspecError:  # stricter than Python's, which servers use: NaN, lone surrogates
        return json.loads(raw)


class Payload:
    """The bytes of a request's body. ``size`` in bytes."""

    def __init__(self, parts: list[str | bytes | bytearray]) -> None:
        self._parts = parts
        self.size = sum(map(len, parts))

    @classmethod
    def of(cls, body: object) -> Payload:
        """The JSON text of a value."""
        mark = secrets.token_hex(16)
        held: list[str] = []
        text = json.dumps(_without_long(body, mark, held))
        if not held:
            return cls([text])
        parts: list[str | bytes | bytearray] = []
        for place, part in enumerate(text.split(mark)):
            if place:
                parts.append(held[place - 1])
            parts.append(part)
        return cls(parts)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The bytes in order, never many at a time."""
        for part in self._parts:
            for start in range(0, len(part), _PIECE):
                piece = part[start : start + _PIECE]
                yield piece.encode("ascii") if isinstance(piece, str) else bytes(piece)


def _without_long(value: Any, mark: str, held: list[str]) -> Any:
    """The value with the mark for each long string that JSON writes as it is."""
    if isinstance(value, str):
        if len(value) < _LONG or not _is_plain(value):
            return value
        held.append(value)
        return mark
    if isinstance(value, dict):
        return {name: _without_long(inner, mark, held) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_long(inner, mark, held) for inner in value]
    return value


def _is_plain(text: str) -> bool:
    """Whether JSON writes it as it is."""
    if not text.isascii():
        return False
    # What is escaped becomes longer. Writing it shows that faster than looking at each
    # character does, and in slices the copies stay small.
    slices = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    return all(len(msgspec.json.encode(one)) == len(one) + 2 for one in slices)
