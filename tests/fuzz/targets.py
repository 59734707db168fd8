# SPDX-License-Identifier: Apache-2.0
"""What is fuzzed: each takes any bytes, and raises only where something is wrong here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ec_connector.codecs.work import unpack
from ec_connector.engine.announced import BadAnnouncement, read_source
from ec_connector.errors import CodecError, ConfigError, MismatchError, WireError
from ec_connector.protocol import local, messages
from ec_connector.protocol.hint import read_hint
from ec_connector.protocol.tickets import Tickets
from tests.fuzz.walk import walk

CORPUS = Path(__file__).parent / "corpus"


def _decoder(decode: Callable[[bytes], Any]) -> Callable[[bytes], None]:
    def target(data: bytes) -> None:
        try:
            message = decode(data)
        except WireError:
            return
        # What was let in can be sent on, and means the same then.
        again = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.encode(decode(again)) == again

    return target


def announced(data: bytes) -> None:
    """A client's ``ec_transfer_params``, as JSON."""
    try:
        params = json.loads(data)
    except (ValueError, RecursionError):
        return
    with contextlib.suppress(BadAnnouncement):
        source = read_source(params, "a", 10, "bfloat16")
        if source is not None:
            assert source.nbytes == 20 * source.shape[1]
            messages_can_hold(source)


def messages_can_hold(source: Any) -> None:
    """The agent must be able to be told of it."""
    item = local.FetchItem(
        "a", 1, source.host, source.port, source.nbytes, "bfloat16", list(source.shape)
    )
    local.decode_to_agent(local.encode_local(local.Fetch([item])))


def tickets(data: bytes) -> None:
    """A key file's text, and a ticket under a good key."""
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(ConfigError):
        found = Tickets.parse(text)
        ticket = found.sign("a", "h", 1, 2, "uint8", [2])
        assert found.verify(ticket, "a", "h", 1, 2, "uint8", [2])
    assert not Tickets([b"k" * 32]).verify(text, "a", "h", 1, 2, "uint8", [2])


def unpacked(data: bytes) -> None:
    """A packed chunk: codec, size, and what is said to be its bytes."""
    import zlib

    if len(data) < 4:
        return
    codec = ["zstd", "lz4", "lossy-int8-rows", "none", "gzip"][data[0] % 5]
    dtype = ["bfloat16", "float32", "uint8"][data[1] % 3]
    nbytes = int.from_bytes(data[2:4], "little")
    with contextlib.suppress(CodecError):
        rows = unpack(codec, data[4:], zlib.crc32(data[4:]), nbytes, dtype, [8, 16])
        assert rows.nbytes == nbytes


def hint(data: bytes) -> None:
    """A line of a router, and the item that it names."""
    with contextlib.suppress(MismatchError):
        item = read_hint(data, 1.0)
        local.decode_to_agent(local.encode_local(local.Fetch([item])))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "to_producer": _decoder(messages.decode_to_producer),
    "to_consumer": _decoder(messages.decode_to_consumer),
    "to_agent": _decoder(local.decode_to_agent),
    "to_client": _decoder(local.decode_to_client),
    "announced": announced,
    "hint": hint,
    "tickets": tickets,
    "unpacked": unpacked,
    "walk": walk,
}
