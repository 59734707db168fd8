# SPDX-License-Identifier: Apache-2.0
"""A stage's messages: tensors arrive as they were; too much is refused before memory is taken."""

from __future__ import annotations

import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as some

from ec_connector.stage.assembly import Assembly, Refused
from ec_connector.stage.errors import StageError
from ec_connector.stage.messages import FRAME_BYTES, MAX_TENSORS, Close, Ok, Run, Tensor, pack

LIMIT = 64 << 20
KINDS = st.one_of(
    some.boolean_dtypes(),
    *(
        kind(endianness=order)
        for kind in (some.integer_dtypes, some.unsigned_integer_dtypes, some.floating_dtypes)
        for order in "<>"
    ),
)
ARRAYS = some.arrays(KINDS, some.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


def frames_of(message, arrays, size=FRAME_BYTES):
    """The frames of a message, as a link cuts them."""
    header, raws = pack(message, arrays, LIMIT)
    pieces = [raw[at : at + size] for raw in raws for at in range(0, len(raw), size)]
    return [memoryview(header), *pieces]


def arrived(frames, assembly=None):
    """What the last of these frames completes; none before may."""
    assembly = assembly or Assembly(LIMIT)
    *first, last = frames
    assert [assembly.take(frame) for frame in first] == [None] * len(first)
    return assembly.take(last)


@given(st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4), st.integers(1, 50), st.data())
def test_tensors_arrive_as_they_were(arrays, size, data):
    """Type with byte order, shape (no axes too), bytes; views in any order; writable."""
    views = {
        name: array.transpose(data.draw(st.permutations(range(array.ndim))))
        for name, array in arrays.items()
    }
    message, got = arrived(frames_of(Run(id=7, graph="g"), views, size))
    assert (message.id, message.graph) == (7, "g")
    assert list(got) == list(views)
    for name, view in views.items():
        assert got[name].dtype.str == view.dtype.str
        assert got[name].shape == view.shape
        assert got[name].tobytes() == view.tobytes()
        assert got[name].flags.writeable


def test_several_frames_and_several_messages():
    """An array of more than one frame, then another message on the same connection."""
    assembly = Assembly(LIMIT)
    big = np.arange(FRAME_BYTES, dtype=np.float32)  # four frames
    frames = frames_of(Ok(id=1), {"big": big, "scalar": np.float64(3.5)})
    assert len(frames) == 6
    _, got = arrived(frames, assembly)
    assert np.array_equal(got["big"], big)
    assert got["scalar"].shape == ()
    assert arrived(frames_of(Close(id=2), {}), assembly)[0] == Close(id=2)


def test_too_large_is_refused_before_memory_is_taken():
    """A claim of 1 TiB: refused with its call's number; what follows of it is dropped."""
    assembly = Assembly(LIMIT)
    claim = Run(id=3, graph="g", tensors=[Tensor("x", "<f4", [1 << 38], 1 << 40)])
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match="exceed the limit of 67108864") as refused:
            assembly.take(memoryview(msgspec.msgpack.encode(claim)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert (refused.value.id, refused.value.code) == (3, "too_large")
    assert assembly.pending_bytes == 0


def test_what_belongs_to_a_refused_message_is_dropped():
    """The next message on the connection is understood."""
    assembly = Assembly(100)
    header, *pieces = frames_of(Run(id=1, graph="g"), {"x": np.zeros(300, np.uint8)}, 100)
    with pytest.raises(Refused):
        assembly.take(header)
    assert [assembly.take(piece) for piece in pieces] == [None] * 3
    assert arrived(frames_of(Close(id=2), {}), assembly)[0] == Close(id=2)


def test_unfinished_messages_of_others_count():
    """The limit is of all connections together."""
    header = frames_of(Run(id=1, graph="g"), {"x": np.zeros(60, np.uint8)})[0]
    assert Assembly(100).take(header, elsewhere=40) is None
    with pytest.raises(Refused, match="exceed the limit of 100"):
        Assembly(100).take(header, elsewhere=41)


def test_a_sender_refuses_too():
    """Too many bytes, and a header of more than 1 MiB, never leave."""
    with pytest.raises(StageError, match="exceed the limit of 8") as raised:
        pack(Ok(), {"x": np.zeros(9, np.uint8)}, 8)
    assert raised.value.code == "too_large"
    with pytest.raises(StageError, match=r"a header of .* exceeds the limit of 1048576"):
        pack(Ok(facts={"much": "x" * FRAME_BYTES}), {}, LIMIT)


@pytest.mark.parametrize("bad", [np.array(["text"]), np.array([object()]), np.zeros(1, "M8[s]")])
def test_only_numbers_are_sent(bad):
    """Nothing that would need code to be made again."""
    with pytest.raises(StageError, match="'x' cannot be sent") as raised:
        pack(Ok(), {"x": bad}, LIMIT)
    assert raised.value.code == "bad_input"


@pytest.mark.parametrize(
    "tensors",
    [
        [Tensor("x", "<f4", [2], 9)],
        [Tensor("x", "<f4", [-2, -1], 8)],
        [Tensor("x", "|O8", [1], 8)],
        [Tensor("x", "|S8", [1], 8)],
        [Tensor("x", "nonsense", [1], 8)],
        [Tensor("x", "<f4", [2], 8), Tensor("x", "<f4", [2], 8)],
        [Tensor("x", "<f4", [2], -8)],
        [Tensor("x", "<f4", [1] * 40, 4)],
        [Tensor(str(number), "<f4", [0], 0) for number in range(MAX_TENSORS + 1)],
    ],
)
def test_tensors_that_cannot_be(tensors):
    """Wrong sizes, foreign types, names twice, too many: refused, and the next message is read."""
    assembly = Assembly(LIMIT)
    payload = b"\0" * max(0, sum(tensor.nbytes for tensor in tensors))
    frames = [msgspec.msgpack.encode(Ok(id=5, tensors=tensors)), payload]
    with pytest.raises(Refused) as refused:
        arrived(map(memoryview, frames), assembly)
    assert refused.value.code == "bad_message"
    assert arrived(frames_of(Close(id=2), {}), assembly)[0] == Close(id=2)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_garbage_is_refused_and_nothing_else(frames):
    """Any bytes: an error of ours or nothing."""
    assembly = Assembly(LIMIT)
    for frame in frames:
        try:
            done = assembly.take(memoryview(frame))
        except Refused:
            continue
        assert done is None or done[0].tensors == []
