# SPDX-License-Identifier: Apache-2.0
"""Peer messages: the version gate, limits, and frames that are not messages."""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from ec_connector.errors import WireError
from ec_connector.protocol import messages
from ec_connector.protocol.messages import (
    MAX_BODY_BYTES,
    MAX_CODEC_CHARS,
    MAX_EXTENTS,
    MAX_FACTOR_CHARS,
    MAX_FACTORS,
    MAX_HASH_CHARS,
    MAX_RANK,
    MAX_TEXT_CHARS,
    MAX_TOKEN_CHARS,
    RegionRef,
    XferAck,
    XferChunk,
    XferCredit,
    XferDone,
    XferPing,
    XferPong,
    XferReq,
    XferStatus,
    decode_to_consumer,
    decode_to_producer,
    encode,
)
from ec_connector.protocol.shown import PROOF_BYTES

REGION = RegionRef(pid=4242, fd=17, nbytes=1 << 30, block_bytes=1 << 16, token="ab" * 16)
FULL: list[messages.ToProducer | messages.ToConsumer] = [
    XferReq(
        "hash", "compat", "session", 2, 7, {"dtype": "bfloat16"}, ["memory", "zmq"], 1, 2, 3,
        "ticket", ["zstd"],
    ),
    XferCredit("session", "hash", 7, 1 << 20),
    XferDone("session", "hash", 7),
    XferPing(7, "ticket"),
    XferPong(
        7, True, "compat", 2, {"dtype": "bfloat16"}, ["memory", "zmq"], ["zstd"], 65536,
        16, 3, 2, 4, 1, 5,
    ),
    XferAck(
        "hash", XferStatus.NACK_INTERNAL, "session", [1, 2], b"agent", b"memory", 7, "memory",
        64, "bfloat16", [4, 8], "message", "factor", "traceback", 9, [(0, 1), (5, 2)], REGION,
        "zstd", b"proof",
    ),
    XferChunk("session", 7, 1 << 20, 1 << 20, "zstd", 1 << 19, 1 << 31),
]  # fmt: skip
"""One of each kind, with no field at its default."""
TO_PRODUCER = (XferReq, XferCredit, XferDone, XferPing)


def decode(frame: bytes, like: object) -> object:
    """Decoded as the side does that gets messages of the kind of ``like``."""
    if isinstance(like, TO_PRODUCER):
        return decode_to_producer(frame)
    return decode_to_consumer(frame)


def as_map(message: object) -> dict[str, Any]:
    """The msgpack map that a message is on the wire."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    assert isinstance(fields, dict)
    return fields


def refused(frame: bytes, like: object) -> None:
    with pytest.raises(WireError):
        decode(frame, like)


def kind_of(message: object) -> str:
    return type(message).__name__


# ── whole messages ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("message", FULL, ids=kind_of)
def test_every_field_survives(message: Any) -> None:
    """Encoded and decoded, a message with every field set is equal to itself."""
    assert set(as_map(message)) == {"type", *message.__struct_fields__}
    assert decode(encode(message), message) == message
    assert decode(memoryview(encode(message)), message) == message  # type: ignore[arg-type]


def test_every_kind_is_covered() -> None:
    """A message that is added gets into these tests."""
    kinds = {*typing.get_args(messages.ToProducer), *typing.get_args(messages.ToConsumer)}
    assert {type(message) for message in FULL} == kinds


@pytest.mark.parametrize("message", FULL, ids=kind_of)
def test_message_for_the_other_side_is_refused(message: Any) -> None:
    """A producer does not take an ack, a consumer no request."""
    other = FULL[-1] if isinstance(message, TO_PRODUCER) else FULL[0]
    refused(encode(message), other)


# ── the version ──────────────────────────────────────────────────────────────


def test_constructing_a_request_gives_our_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that a frame without a version means; a version that is given stays."""
    monkeypatch.setattr(messages, "EC_CONNECTOR_VERSION", 3)
    assert XferReq("h", "c").connector_version == 3
    assert XferReq(mm_hash="h", compatibility_hash="c").connector_version == 3
    assert XferReq("h", "c", "s", 5).connector_version == 5
    assert XferReq("h", "c", connector_version=6).connector_version == 6
    assert copy.copy(XferReq("h", "c", "s", 5)).connector_version == 5
    assert msgspec.structs.replace(XferReq("h", "c", "s", 5), mm_hash="x").connector_version == 5


@pytest.mark.parametrize("version", [1, 2, 3])
def test_version_is_always_on_the_wire(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is ours, 1, or what a missing one means."""
    monkeypatch.setattr(messages, "EC_CONNECTOR_VERSION", 3)
    request = XferReq("h", "c", connector_version=version)
    assert as_map(request)["connector_version"] == version
    assert as_map(XferReq("h", "c"))["connector_version"] == 3
    assert as_map(decode(encode(request), request))["connector_version"] == version


def test_frame_without_a_version_reads_as_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never as the receiver's own, or the gate could not fail."""
    monkeypatch.setattr(messages, "EC_CONNECTOR_VERSION", 3)
    frame = as_map(XferReq("h", "c"))
    del frame["connector_version"]
    read = decode_to_producer(msgspec.msgpack.encode(frame))
    assert isinstance(read, XferReq)
    assert read.connector_version == 1
    assert as_map(read)["connector_version"] == 1


# ── base fields ──────────────────────────────────────────────────────────────


def test_ack_of_base_fields_carries_nothing_else() -> None:
    """What is left at its default is not written, so an in-tree peer can read it."""
    base = XferAck("h", XferStatus.OK, "s", [1], b"a", b"m")
    assert set(as_map(base)) == {
        "type", "mm_hash", "status", "session_id",
        "src_block_indices", "agent_metadata", "mem_descriptor",
    }  # fmt: skip
    assert set(as_map(XferAck("h", XferStatus.NACK_MISSING))) == {"type", "mm_hash", "status"}


def test_ack_stays_small() -> None:
    """An OK with the most extents, the largest numbers and long names is below 1 KiB."""
    largest = (1 << 63) - 1
    ack = XferAck(
        "f" * 64, XferStatus.OK, "s" * 64, xfer_id=largest, plane="memory", nbytes=largest,
        dtype="float8_e4m3fnuz", shape=[1 << 32] * MAX_RANK, generation=largest,
        extents=[(1 << 32, 1 << 32)] * MAX_EXTENTS,
        region=RegionRef(1 << 31, 1 << 31, largest, 1 << 31, "f" * 64), proof=b"p" * PROOF_BYTES,
    )  # fmt: skip
    assert len(encode(ack)) < 1024
    assert decode_to_consumer(encode(ack)) == ack


def test_numbers_of_statuses_are_the_in_tree_ones() -> None:
    """Renumbering would turn one answer into another at every peer."""
    assert {status.name: status.value for status in XferStatus} == {
        "OK": 0,
        "NACK_MISSING": 1,
        "NACK_INCOMPAT": 2,
        "NACK_VERSION": 3,
        "NACK_INTERNAL": 4,
        "NACK_NOT_READY": 5,
    }


# ── frames that are not messages ─────────────────────────────────────────────

_NOT_TEXT = [None, True, 1, 1.5, b"bytes", ["x"], {"a": "b"}]
_NOT_COUNT = [None, True, 1.0, "1", b"1", [1], {"a": 1}, 1 << 63, -1]
_NOT_LIST = [None, True, 1, "text", b"bytes", {"a": 1}]
WRONG: dict[Any, list[Any]] = {
    str: _NOT_TEXT,
    bool: [None, 1, 1.0, "true", b"1", [True], {"a": True}],
    int: _NOT_COUNT,
    bytes: [None, True, 1, "text", [1], {"a": 1}],
    XferStatus: [*_NOT_COUNT, 6, "OK"],
    dict[str, str]: [*_NOT_LIST[:-1], ["a"], {"a": 1}, {1: "a"}, {"a": None}],
    list[str]: [*_NOT_LIST, [1], ["a", None], [b"a"]],
    list[int]: [*_NOT_LIST, ["a"], [1.5], [None], [[1]]],
    list[tuple[int, int]]: [*_NOT_LIST, [1], [[1]], [[1, 2, 3]], [["a", 1]], [[1, None]], [[]]],
    RegionRef | None: [True, 1, "text", [1], {}, {**as_map(REGION), "pid": "1"}],
}
"""For each type of a field, values that are none."""
UNCHECKED_NUMBERS = {
    ("XferReq", "connector_version"),
    ("XferPong", "connector_version"),
    ("XferAck", "src_block_indices"),
}
"""Any number is a version, and one that is not ours is answered, not dropped."""


def fields_of(message: object) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(type(message))
    for name in type(message).__struct_fields__:  # type: ignore[attr-defined]
        hint = hints[name]
        yield name, RegionRef | None if isinstance(hint, types.UnionType) else hint


@pytest.mark.parametrize(
    ("message", "name", "hint"),
    [(message, name, hint) for message in FULL for name, hint in fields_of(message)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_field_of_the_wrong_type_is_refused(message: Any, name: str, hint: Any) -> None:
    """Strict: no number for a text, no float, text or truth value for a number."""
    frame = as_map(message)
    for wrong in WRONG[hint]:
        in_range = not isinstance(wrong, int) or isinstance(wrong, bool)
        if in_range or (kind_of(message), name) not in UNCHECKED_NUMBERS:
            refused(msgspec.msgpack.encode({**frame, name: wrong}), message)


REQUIRED = {
    "XferReq": {"mm_hash", "compatibility_hash"},
    "XferAck": {"mm_hash", "status"},
    "XferChunk": {"session_id", "xfer_id"},
    "XferCredit": {"session_id", "mm_hash"},
    "XferDone": {"session_id", "mm_hash"},
    "XferPing": {"seq"},
    "XferPong": {"seq"},
}


@pytest.mark.parametrize("message", FULL, ids=kind_of)
def test_missing_fields(message: Any) -> None:
    """A required field that is missing is refused; any other one gets its default."""
    for name in message.__struct_fields__:
        frame = as_map(message)
        del frame[name]
        body = msgspec.msgpack.encode(frame)
        if name in REQUIRED[kind_of(message)]:
            refused(body, message)
        else:
            assert getattr(decode(body, message), name) != getattr(message, name)


@pytest.mark.parametrize("message", FULL, ids=kind_of)
def test_wrong_or_missing_type_is_refused(message: Any) -> None:
    """The tag alone decides what a body is."""
    frame = as_map(message)
    for wrong in ("", "REQ", "reply", 1, None, b"req", ["req"]):
        refused(msgspec.msgpack.encode({**frame, "type": wrong}), message)
    del frame["type"]
    refused(msgspec.msgpack.encode(frame), message)


@pytest.mark.parametrize("message", FULL, ids=kind_of)
def test_unknown_fields_are_ignored(message: Any) -> None:
    """What a later release adds does not stop this one."""
    frame = {**as_map(message), "later": {"deep": [1, 2.5, None, b"x", "y"]}}
    assert decode(msgspec.msgpack.encode(frame), message) == message


@pytest.mark.parametrize("message", FULL, ids=kind_of)
def test_truncated_at_every_length_is_refused(message: Any) -> None:
    """No part of a message is a message."""
    frame = encode(message)
    for length in range(len(frame)):
        refused(frame[:length], message)


@pytest.mark.parametrize("message", FULL, ids=kind_of)
def test_trailing_bytes_are_refused(message: Any) -> None:
    """Whatever byte stands behind a message, and a second message too."""
    frame = encode(message)
    for byte in range(256):
        refused(frame + bytes([byte]), message)
    refused(frame + frame, message)


@pytest.mark.parametrize("body", [b"", b"\xc0", b"\x80", b"\x90", b"\xa0", b"\x00", b"{}"])
def test_other_msgpack_is_refused(body: bytes) -> None:
    """Nothing, nil, an empty map or list or text, a number, JSON."""
    refused(body, FULL[0])
    refused(body, FULL[-1])


def _with(field: bytes) -> bytes:
    """A request whose last field is given as raw msgpack, name and value."""
    frame = msgspec.msgpack.encode({"type": "req", "mm_hash": "h", "compatibility_hash": "c"})
    return b"\x84" + frame[1:] + field


@pytest.mark.parametrize(
    "body",
    [
        _with(b"\xa9xfer_id_x" + b"\x91" * 60_000 + b"\xc0"),  # nested far too deep
        _with(b"\xa6planes\xdd\xff\xff\xff\xff"),  # four thousand million texts, none there
        _with(b"\xabfingerprint\xdf\xff\xff\xff\xff"),
        _with(b"\xaasession_id\xdb\xff\xff\xff\xff"),
        _with(b"\xaasession_id\xa1\xff"),  # not UTF-8
        _with(b"\xabfingerprint\x81\xa1\xff\xa1a"),
        _with(b"\xa5later\xc1"),  # a byte that msgpack does not have
        _with(b"\x05\x01"),  # a number for a name
    ],
)
def test_hostile_frames_are_refused(body: bytes) -> None:
    """Depth, sizes that are claimed only, broken text: a WireError, at once."""
    refused(body, FULL[0])


# ── limits ───────────────────────────────────────────────────────────────────

REQ = next(message for message in FULL if isinstance(message, XferReq))
ACK = next(message for message in FULL if isinstance(message, XferAck))
PONG = next(message for message in FULL if isinstance(message, XferPong))
LIMITS: list[tuple[str, Any, str, Callable[[int], Any], int]] = [
    *[
        (f"{kind_of(message)}.{name}", message, name, lambda n: "x" * n, MAX_HASH_CHARS)
        for message in FULL
        for name in ("mm_hash", "session_id", "compatibility_hash")
        if hasattr(message, name)
    ],
    ("dtype", ACK, "dtype", lambda n: "x" * n, 32),
    ("plane", ACK, "plane", lambda n: "x" * n, 32),
    ("factor", ACK, "factor", lambda n: "x" * n, 64),
    ("message", ACK, "message", lambda n: "x" * n, MAX_TEXT_CHARS),
    ("traceback", ACK, "traceback", lambda n: "x" * n, 4 * MAX_TEXT_CHARS),
    ("shape", ACK, "shape", lambda n: [1] * n, MAX_RANK),
    ("proof", ACK, "proof", lambda n: b"x" * n, PROOF_BYTES),
    ("extents", ACK, "extents", lambda n: [(0, 1)] * n, MAX_EXTENTS),
    *[
        (f"{kind_of(message)}.{name}", message, field, make, limit)
        for message in (REQ, PONG)
        for name, field, make, limit in (
            ("planes", "planes", lambda n: ["zmq"] * n, MAX_FACTORS),
            ("plane's name", "planes", lambda n: ["x" * n], MAX_FACTOR_CHARS),
            ("codecs", "codecs", lambda n: ["zstd"] * n, MAX_FACTORS),
            ("codec's name", "codecs", lambda n: ["x" * n], MAX_CODEC_CHARS),
            ("factor's name", "fingerprint", lambda n: {"x" * n: "y"}, MAX_FACTOR_CHARS),
            ("factor's value", "fingerprint", lambda n: {"x": "y" * n}, MAX_FACTOR_CHARS),
        )
    ],
    (
        "token",
        ACK,
        "region",
        lambda n: {"pid": 1, "fd": 1, "nbytes": 1, "block_bytes": 1, "token": "x" * n},
        MAX_TOKEN_CHARS,
    ),
    (
        "fingerprint",
        REQ,
        "fingerprint",
        lambda n: {str(factor): "x" for factor in range(n)},
        MAX_FACTORS,
    ),
]


@pytest.mark.parametrize(
    ("message", "name", "make", "limit"),
    [case[1:] for case in LIMITS],
    ids=[case[0] for case in LIMITS],
)
def test_limits(message: Any, name: str, make: Callable[[int], Any], limit: int) -> None:
    """At its limit a field passes, one beyond it the whole message is refused."""
    frame = as_map(message)
    assert decode(msgspec.msgpack.encode({**frame, name: make(limit)}), message)
    refused(msgspec.msgpack.encode({**frame, name: make(limit + 1)}), message)


@pytest.mark.parametrize(
    "wrong",
    [{"shape": [-1]}, {"shape": [4, -8]}, {"extents": [[-1, 1]]}, {"extents": [[0, 1], [3, -1]]}],
    ids=str,
)
def test_negative_sizes_are_refused(wrong: dict[str, Any]) -> None:
    """Of an axis, or of an extent."""
    refused(msgspec.msgpack.encode({**as_map(ACK), **wrong}), ACK)


def test_body_over_the_limit_is_refused_undecoded() -> None:
    """Even a well-formed one, by its length alone."""
    padding = "x" * (MAX_BODY_BYTES - len(encode(REQ)) - len("padding") - 4)
    fits = msgspec.msgpack.encode({**as_map(REQ), "padding": padding})
    assert len(fits) == MAX_BODY_BYTES
    assert decode_to_producer(fits) == REQ
    too_long = msgspec.msgpack.encode({**as_map(REQ), "padding": padding + "x"})
    with pytest.raises(WireError, match="limit"):
        decode_to_producer(too_long)
