# SPDX-License-Identifier: Apache-2.0
"""Codecs: bytes out and back, what is refused, and who may use which."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_connector.codecs import byte_planes, choice, int8_rows
from ec_connector.codecs.choice import (
    LOSSY,
    LZ4,
    NONE,
    ZSTD,
    aligned_chunk,
    check_codecs,
    choose,
    lacking,
    loss_of,
    suits,
    usable_codecs,
)
from ec_connector.codecs.work import Packed, pack, unpack
from ec_connector.errors import CodecError, ConfigError

pytest.importorskip("zstandard", reason="codec zstd; it is in the test extra")
pytest.importorskip("lz4.block", reason="codec lz4; it is in the test extra")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
WIDTH = 96


def rows(dtype: str, count: int = 64, seed: int = 0) -> Bytes:
    """Rows of floats of about the same magnitude, as bytes."""
    values = np.random.default_rng(seed).standard_normal((count, WIDTH), np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8)
    return values.astype("<f2" if dtype == "float16" else "<f4").reshape(-1).view(np.uint8)


def floats(raw: Bytes, dtype: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What the bytes say, by a way of its own."""
    if dtype == "bfloat16":
        wide = np.zeros((raw.nbytes // 2, 2), "<u2")
        wide[:, 1] = raw.view("<u2")
        return wide.reshape(-1).view("<f4").astype(np.float64)
    return raw.view("<f2" if dtype == "float16" else "<f4").astype(np.float64)


def packed(codec: str, raw: Bytes, dtype: str) -> Packed:
    """Packed, which it must be."""
    made = pack(codec, raw.data, dtype, [raw.nbytes, WIDTH])
    assert made is not None
    assert len(made.data) < raw.nbytes
    return made


def back(codec: str, made: Packed, nbytes: int, dtype: str) -> Bytes:
    """Unpacked."""
    return unpack(codec, made.data, made.checksum, nbytes, dtype, [0, WIDTH])


# ── byte planes ──────────────────────────────────────────────────────────────


@given(st.binary(max_size=70), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_planes_are_put_together_again(raw: bytes, itemsize: int, floats: bool) -> None:
    """Whatever the bytes, whole elements or not."""
    run = np.frombuffer(raw, np.uint8)
    planes = byte_planes.split(run, itemsize, floats=floats)
    assert planes.nbytes == run.nbytes
    assert byte_planes.join(planes, itemsize, floats=floats).tobytes() == raw


def test_first_plane_of_bfloat16_is_its_exponent() -> None:
    """1.0 and -1.5 have the exponent 127; sign and mantissa are in the other plane."""
    run = np.array([0x3F80, 0xBFC0], "<u2").view(np.uint8)
    assert byte_planes.split(run, 2, floats=True).tolist() == [127, 127, 0, 0x81]


# ── lossless ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_zstd_gives_the_same_bytes_in_fewer(dtype: str) -> None:
    """Rows of one magnitude shrink, and come back as they were."""
    raw = rows(dtype)
    made = packed(ZSTD, raw, dtype)
    assert back(ZSTD, made, raw.nbytes, dtype).tobytes() == raw.tobytes()


@pytest.mark.parametrize("codec", [ZSTD, LZ4])
@given(st.binary(min_size=1, max_size=64), st.integers(1, 40), st.sampled_from(["int8", "float16"]))
def test_lossless_codecs_on_any_bytes(codec: str, part: bytes, times: int, dtype: str) -> None:
    """Repeated or not, whole elements or not: the same bytes, or not packed at all."""
    raw = np.frombuffer(part * times, np.uint8)
    made = pack(codec, raw.data, dtype, [1])
    if made is not None:
        assert len(made.data) < raw.nbytes
        assert back(codec, made, raw.nbytes, dtype).tobytes() == raw.tobytes()


@pytest.mark.parametrize("codec", [ZSTD, LZ4])
def test_what_does_not_shrink_is_not_packed(codec: str) -> None:
    """Noise is sent as it is."""
    noise = np.random.default_rng(1).bytes(4096)
    assert pack(codec, noise, "uint8", [4096]) is None


@pytest.mark.parametrize("codec", [ZSTD, LZ4, LOSSY])
def test_damage_is_an_error(codec: str) -> None:
    """Any byte changed, cut off or added is noticed by the checksum."""
    raw = np.tile(rows("float16", 4), 8)
    made = packed(codec, raw, "float16")
    for damaged in (
        made.data[:-1],
        made.data + b"\0",
        b"",
        *(bytes([*made.data[:at], made.data[at] ^ 1, *made.data[at + 1 :]]) for at in range(40)),
    ):
        with pytest.raises(CodecError, match="damaged"):
            unpack(codec, damaged, made.checksum, raw.nbytes, "float16", [0, WIDTH])


@pytest.mark.parametrize("codec", [ZSTD, LZ4, LOSSY])
@given(data=st.binary(max_size=200))
def test_bytes_of_no_codec_are_refused(codec: str, data: bytes) -> None:
    """With a checksum that fits, a decoder still takes only what it made; or gives the size due."""
    try:
        made = unpack(codec, data, zlib.crc32(data), 384, "float16", [0, WIDTH])
    except CodecError:
        return
    assert made.nbytes == 384


def test_zstd_bomb_is_refused_before_it_is_unpacked() -> None:
    """A gigabyte of zeros in some kilobytes: nothing of it is allocated."""
    import tracemalloc

    import zstandard

    maker = zstandard.ZstdCompressor().compressobj(size=1 << 30)
    parts = [maker.compress(bytes(1 << 20)) for _ in range(1 << 10)]
    bomb = b"".join([*parts, maker.flush()])
    assert len(bomb) < 1 << 18
    tracemalloc.start()
    with pytest.raises(CodecError, match="1073741824 bytes where 262144 are due"):
        unpack(ZSTD, bomb, zlib.crc32(bomb), 1 << 18, "uint8", [1])
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_zstd_frame_that_states_no_size_is_refused() -> None:
    """It could be of any size."""
    import zstandard

    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(CodecError, match="-1 bytes where 1000"):
        unpack(ZSTD, frame, zlib.crc32(frame), 1000, "uint8", [1])


@pytest.mark.parametrize("nbytes", [999, 1001])
def test_lz4_block_of_another_size_is_refused(nbytes: int) -> None:
    """Neither more nor fewer bytes than are due."""
    from lz4 import block

    data = block.compress(bytes(nbytes), store_size=False)
    with pytest.raises(CodecError, match="1000"):
        unpack(LZ4, data, zlib.crc32(data), 1000, "uint8", [1])


def test_unknown_codec() -> None:
    """Named in the error, both ways."""
    with pytest.raises(CodecError, match="'brotli' is unknown"):
        pack("brotli", b"abc", "uint8", [3])
    with pytest.raises(CodecError, match="'brotli' is unknown"):
        unpack("brotli", b"abc", zlib.crc32(b"abc"), 4, "uint8", [3])


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the codec, not of the import system."""
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(CodecError, match="library of codec 'zstd' is not installed"):
        pack(ZSTD, bytes(100), "uint8", [100])
    with pytest.raises(CodecError, match="library of codec 'zstd' is not installed"):
        unpack(ZSTD, b"x", zlib.crc32(b"x"), 100, "uint8", [100])


# ── lossy ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("bfloat16", 2**-8), ("float16", 2**-11), ("float32", 2**-23)]
)
def test_lossy_rows_are_near(dtype: str, rounding: float) -> None:
    """Off by half a 127th of the row's largest, and the rounding of the type."""
    raw = rows(dtype, seed=2)
    made = packed(LOSSY, raw, dtype)
    assert len(made.data) == 64 * (WIDTH + 4)
    sent = floats(raw, dtype).reshape(-1, WIDTH)
    came = floats(back(LOSSY, made, raw.nbytes, dtype), dtype).reshape(-1, WIDTH)
    largest = np.abs(sent).max(axis=1, keepdims=True)
    assert (np.abs(came - sent) <= largest * (1 / 254 + rounding) * 1.001).all()
    assert (came != sent).any()


def test_lossy_rows_are_scaled_each_by_itself() -> None:
    """A row a million times smaller is not lost beside a large one."""
    values = rows("float32", 2).view("<f4").reshape(2, WIDTH).copy()
    values[1] *= 1e-6
    raw = values.reshape(-1).view(np.uint8)
    came = floats(back(LOSSY, packed(LOSSY, raw, "float32"), raw.nbytes, "float32"), "float32")
    assert np.allclose(came.reshape(2, WIDTH)[1], values[1], atol=np.abs(values[1]).max() / 250)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.3e38])
def test_rows_that_have_no_scale_are_sent_as_they_are(value: float) -> None:
    """Not a number near it, nor a warning."""
    values = rows("float32", 2).view("<f4").copy()
    values[7] = value
    assert pack(LOSSY, values.view(np.uint8).data, "float32", [2, WIDTH]) is None


@pytest.mark.parametrize("value", [0.0, 1e-40])
def test_rows_of_nothing_are_zeros(value: float) -> None:
    """No division by nothing."""
    raw = np.full(2 * WIDTH, value, "<f4").view(np.uint8)
    came = back(LOSSY, packed(LOSSY, raw, "float32"), raw.nbytes, "float32")
    assert not floats(came, "float32").any()


def test_bfloat16_is_rounded_to_the_nearest_even() -> None:
    """As processors do: halfway to the even one, above it up."""
    values = np.array([0x3F808000, 0x3F818000, 0x3F808001], "<u4").view("<f4")
    rounded = int8_rows._bytes(values, "bfloat16").view("<u2")
    assert rounded.tolist() == [0x3F80, 0x3F82, 0x3F81]


def test_lossy_refuses_scales_that_are_no_numbers() -> None:
    """They would make rows of NaN."""
    data = np.full(1, np.nan, "<f4").tobytes() + bytes(WIDTH)
    with pytest.raises(CodecError, match="a scale is no number"):
        unpack(LOSSY, data, zlib.crc32(data), 2 * WIDTH, "float16", [1, WIDTH])


def test_lossy_refuses_what_has_no_rows() -> None:
    """No floats, or no whole rows."""
    with pytest.raises(CodecError, match="cannot carry int8"):
        pack(LOSSY, bytes(64), "int8", [1, 64])
    data = bytes(10)
    with pytest.raises(CodecError, match="no whole rows"):
        unpack(LOSSY, data, zlib.crc32(data), 100, "float16", [1, WIDTH])


# ── choosing ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("offered", "allowed", "chosen"),
    [
        ([], [NONE], NONE),
        ([], [ZSTD], None),
        ([ZSTD, NONE], [NONE, ZSTD], ZSTD),
        ([NONE, ZSTD], [ZSTD, NONE], NONE),
        (["later", LZ4], [ZSTD, LZ4], LZ4),
        ([ZSTD], [LZ4, NONE], None),
        ([LOSSY, NONE], [LOSSY, NONE], LOSSY),
    ],
)
def test_the_consumer_orders_and_the_producer_allows(
    offered: list[str], allowed: list[str], chosen: str | None
) -> None:
    """The first one offered that is allowed; who offers nothing takes rows as they are."""
    assert choose(offered, allowed, "bfloat16", [4, 32], 4096) == chosen


def test_what_is_not_rows_of_floats_is_not_scaled() -> None:
    """The lossy codec gives way to the next one."""
    for dtype, shape in (("int8", [4, 32]), ("float16", []), ("float16", [2, 4096])):
        assert not suits(LOSSY, dtype, shape, 4096)
        assert choose([LOSSY, NONE], [LOSSY, NONE], dtype, shape, 4096) == NONE


def test_messages_hold_whole_rows() -> None:
    """Of the lossy codec; of the others whole elements, and any bytes where the type is none."""
    assert aligned_chunk(LOSSY, "float16", [9, 96], 4096) == 4096 - 4096 % 192
    assert aligned_chunk(ZSTD, "float32", [9, 96], 4097) == 4096
    assert aligned_chunk(ZSTD, ">f4", [9, 96], 4097) == 4097


def test_missing_libraries_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be used is used; with nothing left, the error says what to install."""
    assert usable_codecs([ZSTD, LZ4, LOSSY, NONE]) == (ZSTD, LZ4, LOSSY, NONE)
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda _: None)
    assert lacking([ZSTD, NONE]) == {ZSTD: "pip install 'ec-connector[zstandard]'"}
    assert usable_codecs([ZSTD, NONE]) == (NONE,)
    with pytest.raises(ConfigError, match=r"ec-connector\[zstandard\].*add 'none'"):
        usable_codecs([ZSTD])


@pytest.mark.parametrize("codecs", [[], ["gzip"], [ZSTD, ZSTD]])
def test_wrong_lists_are_refused(codecs: list[str]) -> None:
    """With the key, the value and what there is."""
    with pytest.raises(ConfigError, match=r"codecs=.*none, zstd, lz4, lossy-int8-rows"):
        check_codecs(codecs)


def test_loss_is_named() -> None:
    """By the codec's own name; without it nothing is lost."""
    assert (loss_of([ZSTD, NONE]), loss_of([NONE, LOSSY])) == ("none", LOSSY)
