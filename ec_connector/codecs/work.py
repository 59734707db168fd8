# SPDX-License-Identifier: Apache-2.0
"""Payload made smaller, and back: bytes in, bytes out, one run of an item at a time.

A run is packed by itself, so it can be lost, repeated or refused by itself. Packed bytes are
always fewer than the run: a run that does not shrink is sent as it is. A CRC-32 goes with
them, and is compared before a decoder sees the bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ec_connector.codecs import byte_planes, int8_rows
from ec_connector.codecs.choice import LOSSY, LZ4, ZSTD, is_float, item_bytes, row_bytes
from ec_connector.errors import CodecError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ZSTD_LEVEL: Final = 1
"""Higher levels search for repetitions, of which rows have none: slower, and not smaller."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A run in fewer bytes, and their CRC-32."""

    data: bytes
    checksum: int


def pack(codec: str, raw: memoryview | bytes, dtype: str, shape: Sequence[int]) -> Packed | None:
    """A run of an item in fewer bytes; None where it does not shrink.

    Args:
        codec: any but ``none``.
        raw: the run: whole rows for the lossy codec, whole elements for the others.
        dtype, shape: of the item that it is of.

    Raises:
        CodecError: unknown, or its library is not here.
    """
    dtype = dtype.removeprefix("torch.")
    run = np.frombuffer(raw, np.uint8)
    if codec == LOSSY:
        width = _width(dtype, shape)
        if int8_rows.packed_nbytes(run.nbytes, width, item_bytes(dtype)) >= run.nbytes:
            return None
        rows = int8_rows.pack(run, dtype, width)
        if rows is None:
            return None
        data = rows.tobytes()
    else:
        planes = byte_planes.split(run, item_bytes(dtype), floats=is_float(dtype))
        data = _compress(codec, planes)
    return Packed(data, zlib.crc32(data)) if len(data) < run.nbytes else None


def unpack(
    codec: str,
    packed: memoryview | bytes,
    checksum: int,
    nbytes: int,
    dtype: str,
    shape: Sequence[int],
) -> Bytes:
    """The ``nbytes`` bytes that were packed. Nothing larger is ever allocated.

    Raises:
        CodecError: damaged, not of this codec, of another size, or its library is not here.
    """
    if len(packed) >= nbytes:
        raise CodecError(f"{len(packed)} packed bytes are not fewer than the {nbytes} of the run")
    found = zlib.crc32(packed)
    if found != checksum:
        raise CodecError(f"damaged on the way: its checksum is {found:#x}, {checksum:#x} was sent")
    dtype = dtype.removeprefix("torch.")
    if codec == LOSSY:
        return _unpack_rows(packed, nbytes, dtype, shape)
    planes = np.frombuffer(_decompress(codec, packed, nbytes), np.uint8)
    if planes.nbytes != nbytes:
        raise CodecError(f"it unpacks to {planes.nbytes} bytes where {nbytes} are due")
    return byte_planes.join(planes, item_bytes(dtype), floats=is_float(dtype))


def _unpack_rows(
    packed: memoryview | bytes, nbytes: int, dtype: str, shape: Sequence[int]
) -> Bytes:
    width = _width(dtype, shape)
    try:
        due = int8_rows.packed_nbytes(nbytes, width, item_bytes(dtype))
        if len(packed) != due:
            raise ValueError(f"{len(packed)} packed bytes where {due} are due")
        return int8_rows.unpack(np.frombuffer(packed, np.uint8), dtype, width)
    except ValueError as error:
        raise CodecError(f"no packed rows: {error}") from error


def _width(dtype: str, shape: Sequence[int]) -> int:
    row = row_bytes(dtype, shape)
    if not row:
        raise CodecError(f"{LOSSY} cannot carry {dtype} of shape {list(shape)}: no rows of floats")
    return row // item_bytes(dtype)


def _compress(codec: str, planes: Bytes) -> bytes:
    try:
        if codec == ZSTD:
            import zstandard

            return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(planes.data)
        if codec == LZ4:
            from lz4 import block

            return bytes(block.compress(planes.data, store_size=False))
    except ImportError as error:
        raise CodecError(f"the library of codec {codec!r} is not installed: {error}") from error
    raise CodecError(f"codec {codec!r} is unknown")


def _decompress(codec: str, packed: memoryview | bytes, nbytes: int) -> bytes:
    try:
        if codec == ZSTD:
            return _from_zstd(packed, nbytes)
        if codec == LZ4:
            return _from_lz4(packed, nbytes)
    except ImportError as error:
        raise CodecError(f"the library of codec {codec!r} is not installed: {error}") from error
    raise CodecError(f"codec {codec!r} is unknown")


def _from_zstd(packed: memoryview | bytes, nbytes: int) -> bytes:
    import zstandard

    try:
        # Where a frame states its size, that much is allocated, whatever limit is given.
        stated = zstandard.frame_content_size(packed)
        if stated != nbytes:
            raise CodecError(f"it says that it unpacks to {stated} bytes where {nbytes} are due")
        return zstandard.ZstdDecompressor().decompress(
            packed, max_output_size=nbytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CodecError(f"no zstd frame: {error}") from error


def _from_lz4(packed: memoryview | bytes, nbytes: int) -> bytes:
    from lz4 import block

    try:
        return bytes(block.decompress(packed, uncompressed_size=nbytes))
    except block.LZ4BlockError as error:
        raise CodecError(f"no lz4 block of {nbytes} bytes: {error}") from error
