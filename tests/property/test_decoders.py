# SPDX-License-Identifier: Apache-2.0
"""Decoders under random input: a message or a WireError, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_connector.errors import WireError
from ec_connector.protocol import local, messages
from ec_connector.protocol.messages import MAX_EXTENTS, MAX_FACTORS, MAX_RANK, XferStatus

pytestmark = pytest.mark.property

Decode = Callable[[bytes], Any]
DECODERS: list[Decode] = [
    messages.decode_to_producer,
    messages.decode_to_consumer,
    local.decode_to_agent,
    local.decode_to_client,
]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
count = st.integers(0, (1 << 63) - 1)
number = st.integers(-(1 << 63), (1 << 64) - 1)
extents = st.lists(st.tuples(count, count), max_size=MAX_EXTENTS)
shape = st.lists(count, max_size=MAX_RANK)
regions = st.builds(messages.RegionRef, count, count, count, count, text)

to_producer = st.one_of(
    st.builds(
        messages.XferReq,
        mm_hash=text,
        compatibility_hash=text,
        session_id=text,
        connector_version=number,
        xfer_id=count,
        fingerprint=st.dictionaries(text, text, max_size=MAX_FACTORS),
        planes=st.lists(text, max_size=4),
        credit_bytes=count,
        chunk_bytes=count,
        timeout_ms=count,
        codecs=st.lists(text, max_size=4),
    ),
    st.builds(messages.XferCredit, text, text, count, count),
    st.builds(messages.XferDone, text, text, count),
    st.builds(messages.XferPing, count, text),
)
to_consumer = st.one_of(
    st.builds(
        messages.XferAck,
        mm_hash=text,
        status=st.sampled_from(XferStatus),
        session_id=text,
        src_block_indices=st.lists(number, max_size=4),
        agent_metadata=st.binary(max_size=8),
        mem_descriptor=st.binary(max_size=8),
        xfer_id=count,
        plane=text,
        nbytes=count,
        dtype=text,
        shape=shape,
        message=text,
        factor=text,
        traceback=text,
        generation=count,
        extents=extents,
        region=st.none() | regions,
        codec=text,
    ),
    st.builds(messages.XferChunk, text, count, count, count, text, count, count),
    st.builds(
        messages.XferPong,
        seq=count,
        withheld=st.booleans(),
        compatibility_hash=text,
        connector_version=number,
        fingerprint=st.dictionaries(text, text, max_size=MAX_FACTORS),
        planes=st.lists(text, max_size=4),
        codecs=st.lists(text, max_size=4),
        blocks=count,
        items=count,
    ),
)
seconds = st.floats(0, 1e6)
sums = st.dictionaries(text, st.dictionaries(text, seconds, max_size=3), max_size=3)
reserved = st.builds(local.ReservedItem, text, count, extents, st.booleans(), text)
to_client = st.one_of(
    st.builds(local.Welcome, text, count, regions, text, count, count),
    st.builds(local.Reserved, count, st.lists(reserved, max_size=3)),
    st.builds(local.Ready, text, count, extents, count, text, shape, text, text, count),
    st.builds(local.Failed, text, text, text, text, text),
    st.builds(local.Stats, st.dictionaries(text, number | text | st.floats(allow_nan=False))),
    st.builds(
        local.State,
        agent_pid=count,
        address=text,
        compatibility_hash=text,
        factors=st.dictionaries(text, text, max_size=3),
        planes=st.lists(text, max_size=3),
        codecs=st.lists(text, max_size=3),
        values=st.dictionaries(text, number),
        links=sums,
        reasons=st.dictionaries(text, st.dictionaries(text, count, max_size=3), max_size=3),
        peers=st.lists(st.builds(local.PeerSums, text, text, text, text, count), max_size=3),
        transfers=st.lists(
            st.builds(
                local.Transfer,
                count,
                *[text] * 7,
                *[count] * 5,
                seconds=st.dictionaries(text, seconds, max_size=3),
                total=seconds,
            ),
            max_size=3,
        ),
    ),
    st.builds(local.Refused, text),
)
reserve = st.builds(local.ReserveItem, text, count, text, shape)
fetch = st.builds(local.FetchItem, text, count, text, count, count, text, shape)
saves = st.lists(st.tuples(text, count), max_size=3)
to_agent = st.one_of(
    st.builds(local.Hello, count, text, count),
    st.builds(local.Reserve, count, count, st.lists(reserve, max_size=3), st.booleans()),
    st.builds(local.Saved, saves),
    st.builds(local.SaveFailed, text, count, text, text),
    st.builds(local.StepDone, count),
    st.builds(local.Fetch, st.lists(fetch, max_size=3)),
    st.builds(local.Release, st.lists(text, max_size=3)),
    st.builds(local.Loaded, st.lists(text, max_size=3)),
    st.builds(local.DropAll, factors=st.dictionaries(text, text, max_size=3)),
    st.builds(local.AskStats, count),
    st.builds(local.AskState, count),
)
any_message = st.one_of(to_producer, to_consumer, to_agent, to_client)

NAMES = sorted(
    {
        name
        for kind in (
            *(messages.XferReq, messages.XferAck, messages.XferChunk, messages.XferDone),
            *(local.Welcome, local.Fetch, local.Ready, local.Stats, local.Reserved),
        )
        for name in kind.__struct_fields__
    }
)
values = st.recursive(
    st.none() | st.booleans() | number | st.floats() | text | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES) | text | st.integers(0, 3), inner, max_size=4)
    ),
    max_leaves=8,
)


def altered(message: Any, values_by_name: dict[str, Any]) -> bytes:
    """The frame of a message in which some fields have other values, or are added."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return msgspec.msgpack.encode({**fields, **values_by_name})


lookalikes = st.builds(
    altered, any_message, st.dictionaries(st.sampled_from(NAMES), values, max_size=3)
)


def message_or_wire_error(decode: Decode, frame: bytes) -> Any:
    """What the frame decodes to; None where it is refused the way it should be."""
    try:
        return decode(frame)
    except WireError:
        return None


def damaged(frame: bytes, damage: list[tuple[int, int, bytes]]) -> bytes:
    """The frame with some of its parts overwritten, cut out or made longer."""
    for at, cut, put in damage:
        place = at % (len(frame) + 1)
        frame = frame[:place] + put + frame[place + cut :]
    return frame


@given(to_producer)
def test_requests_survive(message: messages.ToProducer) -> None:
    """Any message within the limits arrives as it was sent."""
    assert messages.decode_to_producer(messages.encode(message)) == message


@given(to_consumer)
def test_answers_survive(message: messages.ToConsumer) -> None:
    """Any message within the limits arrives as it was sent."""
    assert messages.decode_to_consumer(messages.encode(message)) == message


@given(to_agent)
def test_messages_to_an_agent_survive(message: local.ToAgent) -> None:
    """Any message arrives as it was sent."""
    assert local.decode_to_agent(local.encode_local(message)) == message


@given(to_client)
def test_messages_to_a_client_survive(message: local.ToClient) -> None:
    """Any message arrives as it was sent."""
    assert local.decode_to_client(local.encode_local(message)) == message


@given(st.binary(max_size=64))
def test_random_bytes(frame: bytes) -> None:
    """No bytes raise anything but a WireError."""
    for decode in DECODERS:
        message_or_wire_error(decode, frame)


@given(
    any_message, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.binary(max_size=3)))
)
def test_damaged_frames(message: Any, damage: list[tuple[int, int, bytes]]) -> None:
    """Damage is refused, or leaves a message that can be sent on and read again."""
    frame = damaged(msgspec.msgpack.encode(message), damage)
    for decode in DECODERS:
        read = message_or_wire_error(decode, frame)
        if read is not None:
            again = msgspec.msgpack.encode(read)
            assert msgspec.msgpack.encode(decode(again)) == again


@given(lookalikes)
def test_lookalikes(frame: bytes) -> None:
    """Right names with wrong values are refused, or every value is of its field's type."""
    for decode in DECODERS:
        message = message_or_wire_error(decode, frame)
        if message is not None:
            # Strict conversion from plain values checks each field's type once more.
            plain = msgspec.to_builtins(message, builtin_types=(bytes,))
            assert msgspec.convert(plain, type(message)) == message or _has_nan(message)


def _has_nan(message: object) -> bool:
    return "nan" in repr(message)
