# SPDX-License-Identifier: Apache-2.0
"""What caller and worker say to each other: headers in msgpack, tensors' bytes behind them.

A message is one header frame of at most 1 MiB, then the bytes of its tensors one after the
other in frames of at most 1 MiB. A receiver knows from the header how many bytes follow, and
refuses too many before it has taken memory for any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ec_connector.arrays import array_of, bytes_of
from ec_connector.dtypes import MAX_RANK, DTypeError
from ec_connector.stage.errors import StageError

FRAME_BYTES = 1 << 20
MAX_TENSORS = 256
DEFAULT_PAYLOAD_BYTES = 2 << 30


class Tensor(msgspec.Struct, frozen=True):
    """One tensor: element type (numpy's spelling with the byte order, or torch's name for what
    numpy lacks, little endian), sizes of its axes, bytes in C order."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int


class _Message(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="t", kw_only=True):
    id: int = 0
    tensors: list[Tensor] = []


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """Who are you?"""


class Load(_Message, frozen=True, kw_only=True, tag="load"):
    """Open the graph that the worker knows by this name; ``providers`` in order of preference."""

    graph: str
    providers: list[str] = []


class Run(_Message, frozen=True, kw_only=True, tag="run"):
    """Run a loaded graph on the tensors; ``outputs`` names those wanted, none means all."""

    graph: str
    outputs: list[str] = []


class Stats(_Message, frozen=True, kw_only=True, tag="stats"):
    """What have you done?"""


class Close(_Message, frozen=True, kw_only=True, tag="close"):
    """The caller is done."""


class Ok(_Message, frozen=True, kw_only=True, tag="ok"):
    """The answer of that id. That of id 0 is a worker that connected and says who it is."""

    facts: dict[str, Any] = {}


class Err(_Message, frozen=True, kw_only=True, tag="err"):
    """The call of that id failed."""

    code: str
    message: str
    traceback: str = ""


Request = Hello | Load | Run | Stats | Close
Reply = Ok | Err
Message = Request | Reply

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def decode(frame: bytes | memoryview) -> Message:
    """A header.

    Raises:
        StageError: ``bad_message``, no header of ours, or tensors that cannot be.
    """
    try:
        message = _decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise StageError("bad_message", f"not a message of a stage: {error}") from error
    if len(message.tensors) > MAX_TENSORS:
        raise StageError(
            "bad_message", f"{len(message.tensors)} tensors exceed the limit of {MAX_TENSORS}"
        )
    names = [tensor.name for tensor in message.tensors]
    if len(set(names)) != len(names):
        raise StageError("bad_message", f"a tensor's name comes twice: {names}")
    for tensor in message.tensors:
        if not 0 <= tensor.nbytes < 1 << 62 or len(tensor.shape) > MAX_RANK:
            raise StageError("bad_message", f"{tensor} is no tensor")
    return message


def payload_bytes(message: Message) -> int:
    """How many bytes follow a header."""
    return sum(tensor.nbytes for tensor in message.tensors)


def pack(
    message: Message, arrays: Mapping[str, np.ndarray[Any, Any]], limit: int
) -> tuple[bytes, list[memoryview]]:
    """The header with the arrays described in it, and their bytes.

    Raises:
        StageError: ``bad_input`` for what is no array of numbers, ``too_large`` beyond
            ``limit`` bytes or for a header of more than 1 MiB.
    """
    tensors, raws = [], []
    for name, array in arrays.items():
        try:
            dtype, raw = bytes_of(array)
        except DTypeError as error:
            raise StageError("bad_input", f"tensor {name!r} cannot be sent: {error}") from error
        if array.dtype.kind in "biufc":
            dtype = array.dtype.str
        tensors.append(Tensor(name, dtype, list(array.shape), raw.nbytes))
        raws.append(raw.data)
    check_size(sum(tensor.nbytes for tensor in tensors), limit)
    header = _encode(msgspec.structs.replace(message, tensors=tensors))
    if len(header) > FRAME_BYTES:
        raise StageError(
            "too_large", f"a header of {len(header)} bytes exceeds the limit of {FRAME_BYTES}"
        )
    return header, raws


def check_size(nbytes: int, limit: int) -> None:
    """Raises StageError, ``too_large``, when more bytes follow than are taken."""
    if nbytes > limit:
        raise StageError(
            "too_large",
            f"{nbytes} bytes of tensors exceed the limit of {limit}; "
            "raise it on both sides (payload_limit, --payload-limit) or send less at once",
        )


def unpack(
    message: Message, raw: np.ndarray[Any, np.dtype[np.uint8]]
) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors by name, views of ``raw``, which holds all that followed the header.

    Raises:
        StageError: ``bad_message``, a type that cannot be carried, or bytes that are not
            of the shape.
    """
    arrays, offset = {}, 0
    for tensor in message.tensors:
        part = raw[offset : offset + tensor.nbytes]
        offset += tensor.nbytes
        try:
            if part.ctypes.data % 16:  # a view of wider elements may have to be aligned
                part = part.copy()
            arrays[tensor.name] = array_of(part, tensor.dtype, tensor.shape)
        except DTypeError as error:
            raise StageError("bad_message", f"tensor {tensor.name!r}: {error}") from error
    return arrays
