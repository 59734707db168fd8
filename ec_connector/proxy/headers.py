# SPDX-License-Identifier: Apache-2.0
"""Which headers pass from client to server and back, and which belong to one hop."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

RawHeaders = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Of the request as the client sent it; each hop has its own. Answers have to be readable here.
_OF_THE_REQUEST = frozenset({b"host", b"content-length", b"expect", b"accept-encoding"})
# What the client asks of its own answer, and of the server that decodes.
_RANK = b"x-data-parallel-rank"
_OF_THE_CLIENT = frozenset({b"accept", b"content-type", b"range", _RANK})


def for_server(headers: RawHeaders, rank: int | None = None) -> list[tuple[str, str]]:
    """Of a client's headers, those for the server that answers it, and for this rank of it."""
    dropped = _OF_THE_REQUEST if rank is None else _OF_THE_REQUEST | {_RANK}
    return [*_forwardable(headers, dropped), ("Accept-Encoding", "identity"), *_addressed(rank)]


def for_reading(headers: RawHeaders, rank: int | None = None) -> list[tuple[str, str]]:
    """Of a client's headers, those for a request whose answer the router reads itself."""
    return [
        *_forwardable(headers, _OF_THE_REQUEST | _OF_THE_CLIENT),
        ("Content-Type", "application/json"),
        ("Accept-Encoding", "identity"),
        *_addressed(rank),
    ]


def _addressed(rank: int | None) -> list[tuple[str, str]]:
    return [] if rank is None else [("X-Data-Parallel-Rank", str(rank))]


def for_answer(headers: RawHeaders, *, same_length: bool = False) -> list[tuple[bytes, bytes]]:
    """Of a server's headers, those for the client."""
    dropped = frozenset() if same_length else frozenset({b"content-length"})
    return _kept(headers, dropped)


def with_request_id(headers: RawHeaders) -> tuple[list[tuple[bytes, bytes]], str]:
    """The headers with an ``X-Request-Id``, so that one name is in every server's log."""
    headers = list(headers)
    for name, value in headers:
        if name == b"x-request-id" and value:
            text = value[:128].decode("latin-1")
            return headers, text if text.isascii() and text.isprintable() else ascii(text)
    request_id = uuid.uuid4().hex
    return [*headers, (b"x-request-id", request_id.encode())], request_id


def _kept(headers: RawHeaders, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    pairs = [(name.lower(), value) for name, value in headers]
    # A Connection header names further headers that are for one hop only.
    named = {
        token.strip().lower()
        for name, value in pairs
        if name == b"connection"
        for token in value.split(b",")
    }
    gone = _HOP_BY_HOP | dropped | named
    return [pair for pair in pairs if pair[0] not in gone]


def _forwardable(headers: RawHeaders, dropped: frozenset[bytes]) -> list[tuple[str, str]]:
    return [
        (name.decode("latin-1"), value.decode("utf-8", "replace"))
        for name, value in _kept(headers, dropped)
    ]
