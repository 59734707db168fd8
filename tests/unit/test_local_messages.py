# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine's processes and their agent."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest

from ec_connector.errors import WireError
from ec_connector.protocol import local
from ec_connector.protocol.local import (
    AskState,
    AskStats,
    DropAll,
    Failed,
    Fetch,
    FetchItem,
    Hello,
    Loaded,
    PeerSums,
    Ready,
    Refused,
    Release,
    Reserve,
    Reserved,
    ReservedItem,
    ReserveItem,
    Saved,
    SaveFailed,
    State,
    Stats,
    StepDone,
    Transfer,
    Welcome,
    decode_to_agent,
    decode_to_client,
    encode_local,
)
from ec_connector.protocol.messages import RegionRef

REGION = RegionRef(pid=4242, fd=17, nbytes=1 << 30, block_bytes=1 << 16, token="ab" * 16)
TO_AGENT: list[Any] = [
    Hello(4242, "worker", 2, "c0ffee", {"model": "m"}),
    Reserve(1, 2, [ReserveItem("key", 64, "bfloat16", [4, 8])], True),
    Saved([("key", 1), ("other", 2)]),
    SaveFailed("key", 1, "message", "traceback"),
    StepDone(3),
    Fetch([FetchItem("key", 10_000, "127.0.0.1", 14579, 64, "bfloat16", [4, 8], "t")]),
    Release(["key", "other"]),
    Loaded(["key", "other"]),
    DropAll(factors={"model": "m", "weights_version": "version 7"}),
    AskStats(5, {"fallback_items": {"deadline": 1}}),
    AskState(7),
]
TO_CLIENT: list[Any] = [
    Welcome("agent", 4243, REGION, "127.0.0.1", 14579, 2),
    Reserved(1, [ReservedItem("key", 1, [(0, 2), (7, 1)], True, "why")]),
    Ready("key", 1, [(0, 2)], 64, "bfloat16", [4, 8], "zmq", "127.0.0.1:14579", 900),
    Failed("key", "incompatible", "message", "weights", "127.0.0.1:14579"),
    Stats(
        {"pool": {"free": 3, "share": 0.5}, "name": "x", "list": [1, None]},
        5,
        {"bytes": {"lan consumer payload_in": 7}},
    ),
    State(
        4243,
        "127.0.0.1:14579",
        "c0ffee",
        {"model": "m"},
        ["zmq"],
        ["none"],
        {"blocks": 1},
        {"bytes": {"lan consumer payload_in": 7}},
        {"fallback_items": {"deadline": 1}},
        [PeerSums("127.0.0.1:1", "consumer", "lan", "zmq", 1, 1, 2, 3, 0.5)],
        [
            Transfer(
                1,
                "key",
                "127.0.0.1:1",
                "consumer",
                "lan",
                "zmq",
                "zstd",
                "delivered",
                64,
                1,
                2,
                3,
                4,
                {"waiting": 0.25},
                0.5,
            )
        ],
    ),
    Refused("message"),
]
ALL = [*TO_AGENT, *TO_CLIENT]
"""One of each kind, with no field at its default."""


def decode(frame: bytes, like: object) -> object:
    """Decoded as the side does that gets messages of the kind of ``like``."""
    return decode_to_agent(frame) if like in TO_AGENT else decode_to_client(frame)


def as_map(message: object) -> dict[str, Any]:
    """The msgpack map that a message is between the processes."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    assert isinstance(fields, dict)
    return fields


def refused(frame: bytes, like: object) -> None:
    with pytest.raises(WireError):
        decode(frame, like)


def kind_of(message: object) -> str:
    return type(message).__name__


@pytest.mark.parametrize("message", ALL, ids=kind_of)
def test_every_field_survives(message: Any) -> None:
    """Encoded and decoded, a message with every field set is equal to itself."""
    assert set(as_map(message)) == {"type", *message.__struct_fields__}
    assert decode(encode_local(message), message) == message


def test_every_kind_is_covered() -> None:
    """A message that is added gets into these tests."""
    kinds = {*typing.get_args(local.ToAgent), *typing.get_args(local.ToClient)}
    assert {type(message) for message in ALL} == kinds


def test_types_are_told_apart() -> None:
    """No two kinds share a tag, in either direction."""
    tags = [as_map(message)["type"] for message in ALL]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("message", ALL, ids=kind_of)
def test_message_for_the_other_side_is_refused(message: Any) -> None:
    """An agent takes nothing that an agent says, a client nothing that a client says."""
    refused(encode_local(message), TO_CLIENT[0] if message in TO_AGENT else TO_AGENT[0])


@pytest.mark.parametrize("message", ALL, ids=kind_of)
def test_missing_fields(message: Any) -> None:
    """A field without a default must be there; any other one gets its default."""
    fields = msgspec.structs.fields(message)
    for field in fields:
        frame = as_map(message)
        del frame[field.name]
        body = msgspec.msgpack.encode(frame)
        if field.required:
            refused(body, message)
        else:
            assert getattr(decode(body, message), field.name) != getattr(message, field.name)


@pytest.mark.parametrize("message", ALL, ids=kind_of)
def test_field_of_the_wrong_type_is_refused(message: Any) -> None:
    """No field takes nil, a float or bytes; none takes what another field's type is."""
    samples = [1, "text", True, [1], {"a": 1}, [["a"]]]
    for name in message.__struct_fields__:
        value = getattr(message, name)
        other = [
            sample
            for sample in samples
            if type(sample) is not type(value) and not isinstance(value, msgspec.Struct)
        ]
        for wrong in (None, 1.5, b"bytes", *other):
            refused(msgspec.msgpack.encode({**as_map(message), name: wrong}), message)


@pytest.mark.parametrize(
    ("message", "name", "wrong"),
    [
        (TO_AGENT[1], "items", [{"key": "k"}]),
        (TO_AGENT[1], "items", [1]),
        (TO_AGENT[2], "items", [["key"]]),
        (TO_AGENT[2], "items", [[1, "key"]]),
        (TO_AGENT[2], "items", [["key", 1, 2]]),
        (TO_AGENT[5], "items", [{"key": "k"}]),
        (TO_AGENT[6], "keys", [1]),
        (TO_CLIENT[0], "region", {"pid": 1}),
        (TO_CLIENT[1], "items", [{"generation": 1}]),
        (TO_CLIENT[2], "extents", [[1]]),
        (TO_CLIENT[2], "shape", ["4"]),
        (TO_CLIENT[4], "values", {1: 2}),
    ],
)
def test_nested_values_of_the_wrong_type_are_refused(message: Any, name: str, wrong: Any) -> None:
    """Items within a list are as strict as fields."""
    refused(msgspec.msgpack.encode({**as_map(message), name: wrong}), message)


@pytest.mark.parametrize("message", ALL, ids=kind_of)
def test_truncated_and_trailing_are_refused(message: Any) -> None:
    """No part of a message is a message, and nothing stands behind one."""
    frame = encode_local(message)
    for length in range(len(frame)):
        refused(frame[:length], message)
    for byte in range(256):
        refused(frame + bytes([byte]), message)


@pytest.mark.parametrize("message", ALL, ids=kind_of)
def test_unknown_fields_and_types(message: Any) -> None:
    """A field more is ignored, another type is refused."""
    frame = as_map(message)
    assert decode(msgspec.msgpack.encode({**frame, "later": [1, {"x": None}]}), message) == message
    refused(msgspec.msgpack.encode({**frame, "type": "later"}), message)
    del frame["type"]
    refused(msgspec.msgpack.encode(frame), message)


@pytest.mark.parametrize(
    "value",
    [
        b"\x91" * 100_000 + b"\xc0",  # nested far too deep
        b"\xdd\xff\xff\xff\xff",  # four thousand million items, none there
        b"\xdf\xff\xff\xff\xff",
        b"\xa1\xff",  # not UTF-8
        b"\x81\x81\x01\x02\x03",  # a map as a map's key
        b"\xc1",
    ],
)
def test_hostile_free_form_values_are_refused(value: bytes) -> None:
    """Statistics may hold anything, and still nothing but a WireError comes of it."""
    head = msgspec.msgpack.encode({"type": "stats"})
    refused(b"\x82" + head[1:] + b"\xa6values\x81\xa1a" + value, TO_CLIENT[0])


def test_message_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent refuses what is too long by its length alone, well-formed or not."""
    frame = encode_local(TO_AGENT[0])
    monkeypatch.setattr(local, "MAX_LOCAL_BYTES", len(frame))
    assert decode_to_agent(frame) == TO_AGENT[0]
    monkeypatch.setattr(local, "MAX_LOCAL_BYTES", len(frame) - 1)
    with pytest.raises(WireError, match="exceeds"):
        decode_to_agent(frame)
