# SPDX-License-Identifier: Apache-2.0
"""Producers that lie in packed form, against a real consumer's agent that takes codecs."""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from ec_connector import Consumer
from ec_connector.codecs.work import pack
from ec_connector.errors import FetchError, MismatchError
from ec_connector.protocol.messages import XferChunk, XferReq
from ec_connector.testing import FakeProducer
from tests.security.hostile import (
    PATIENCE,
    ROWS,
    SMALL,
    Lie,
    RawProducer,
    Victim,
    altered,
    attempt,
    grant,
    sockets,
)

pytest.importorskip("zstandard", reason="codec zstd; it is in the test extra")
pytest.importorskip("lz4.block", reason="codec lz4; it is in the test extra")

CODECS = ["zstd", "lz4", "none"]
TIMEOUT = 0.3
BYTES = ROWS.tobytes()
BOMB_BYTES = 256 << 20


@pytest.fixture(scope="module")
def good() -> Iterator[FakeProducer]:
    """A producer that tells the truth."""
    with FakeProducer(**SMALL, codecs=CODECS) as producer:
        yield producer


@pytest.fixture(scope="module")
def consumer(good: FakeProducer) -> Iterator[Consumer]:
    """Whose agent is lied to."""
    with Consumer(**SMALL, planes=["zmq"], codecs=CODECS) as consumer:
        for number in range(40):  # until its pool has been all used once, and its threads run
            rows = ROWS + np.uint32(number)
            again = consumer.fetch(f"warm {number}", good.put(f"warm {number}", rows), PATIENCE)
            assert (again == rows).all()
        assert consumer.stats()["packed_bytes_received"]
        yield consumer


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context[Any]]:
    """The attacker's own."""
    with sockets() as context:
        context.socket(zmq.PAIR).close()  # its threads start with the first
        yield context


@pytest.fixture
def liar(context: zmq.Context[Any]) -> Iterator[RawProducer]:
    """One that answers what each test says."""
    liar = RawProducer(context)
    yield liar
    liar.close()


@pytest.fixture
def victim(consumer: Consumer, good: FakeProducer) -> Iterator[Victim]:
    """The consumer's agent; whole afterwards, and fetching."""
    victim = Victim(consumer)
    yield victim
    announcement = good.put("after", ROWS)
    assert (consumer.fetch("after", announcement, timeout=PATIENCE) == ROWS).all()
    victim.assert_whole()


def packed(req: XferReq, data: bytes, at: int = 0, size: int = len(BYTES), **fields: Any) -> Any:
    """A chunk that is true about everything but its bytes, unless ``fields`` say otherwise."""
    chunk = XferChunk(req.session_id, req.xfer_id, at, size, "zstd", len(data), zlib.crc32(data))
    return [altered(chunk, **fields), data]


def granted(*chunks: tuple[bytes, dict[str, Any]], codec: str = "zstd") -> Lie:
    """A grant with a codec, and these chunks behind it."""
    return lambda req: [
        [grant(req, ROWS, codec=codec)],
        *(packed(req, data, **{"codec": codec, **fields}) for data, fields in chunks),
    ]


def bomb() -> bytes:
    """Zeros that need a quarter of a GiB, in some kilobytes."""
    import zstandard

    maker = zstandard.ZstdCompressor().compressobj(size=BOMB_BYTES)
    parts = [maker.compress(bytes(1 << 20)) for _ in range(BOMB_BYTES >> 20)]
    return b"".join([*parts, maker.flush()])


def true(codec: str = "zstd") -> bytes:
    """The rows, packed as they should be."""
    made = pack(codec, BYTES, "uint32", ROWS.shape)
    assert made is not None
    return made.data


TRUE = true()
LZ4_BOMB = b"\x1f\x00\x01\x00" + b"\xff" * 60_000 + b"\x00"
"""One zero, and a match of fifteen million bytes."""
LIES: dict[str, Lie] = {
    "a bomb": granted((bomb(), {})),
    "a bomb for lz4": granted((LZ4_BOMB, {}), codec="lz4"),
    "noise": granted((os.urandom(5000), {})),
    "noise for lz4": granted((os.urandom(5000), {}), codec="lz4"),
    "another checksum": granted((TRUE, {"checksum": 1})),
    "a checksum beyond 63 bits": granted((TRUE, {"checksum": 1 << 63})),
    "rows of another codec": granted((true("lz4"), {})),
    "a chunk of another codec": granted((TRUE, {"codec": "lz4"})),
    "a codec that nobody knows": granted((TRUE, {}), codec="brotli"),
    "a lossy codec": granted((TRUE, {}), codec="lossy-int8-rows"),
    "none as a codec": granted((BYTES, {}), codec="none"),
    "packed without a codec": lambda req: [
        [grant(req, ROWS)],
        packed(req, TRUE),
    ],
    "fewer packed bytes than it says": granted((TRUE, {"packed_nbytes": len(TRUE) + 1})),
    "more packed bytes than it says": granted((TRUE, {"packed_nbytes": len(TRUE) - 1})),
    "packed bytes beyond all memory": granted((TRUE, {"packed_nbytes": (1 << 63) - 1})),
    "packed to more than it was": granted((BYTES + b"x", {})),
    "packed to nothing": granted((b"", {})),
    "no bytes at all": lambda req: [
        [grant(req, ROWS, codec="zstd")],
        packed(req, b"", packed_nbytes=len(TRUE))[:1],
    ],
    "a run beyond the item": granted((TRUE, {"size": len(BYTES) + 1})),
    "a run beyond all memory": granted((TRUE, {"size": (1 << 63) - 1})),
    "a run out of order": granted((TRUE, {"at": 8})),
    "the whole item twice": lambda req: [
        [grant(req, ROWS, codec="zstd")],
        *[packed(req, os.urandom(400), size=1200)] * 2,
    ],
    "rows behind an ack with a codec": lambda req: [[grant(req, ROWS, codec="zstd"), BYTES]],
    "two frames": lambda req: [
        [grant(req, ROWS, codec="zstd")],
        [*packed(req, TRUE), TRUE],
    ],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_lies(
    victim: Victim,
    consumer: Consumer,
    liar: RawProducer,
    lie: Lie,
    request: pytest.FixtureRequest,
) -> None:
    """The fetch fails, soon, and the agent neither grows nor stops."""
    liar.lie = lie
    begun = time.monotonic()
    delivered = False
    with contextlib.suppress(FetchError):
        consumer.fetch(request.node.name, liar.announce(ROWS), timeout=TIMEOUT)
        delivered = True
    attempt("packed lies of a producer", got_in=delivered)
    assert not delivered
    assert time.monotonic() - begun < TIMEOUT + 2.0
    assert liar.heard, "it was not asked, so nothing is shown"


def test_the_truth_in_packed_form(victim: Victim, consumer: Consumer, liar: RawProducer) -> None:
    """So the lies above fail for what they are, not for how they are made."""
    liar.lie = granted((TRUE, {}))
    rows = consumer.fetch("true", liar.announce(ROWS), timeout=PATIENCE)
    assert (rows == ROWS).all()


def test_a_bomb_is_told(victim: Victim, consumer: Consumer, liar: RawProducer) -> None:
    """With the sizes."""
    liar.lie = LIES["a bomb"]
    with pytest.raises(MismatchError, match=f"unpacks to {BOMB_BYTES} bytes where 240000 are due"):
        consumer.fetch("bomb", liar.announce(ROWS), timeout=PATIENCE)


def test_more_than_there_is_credit_for(
    victim: Victim, consumer: Consumer, liar: RawProducer
) -> None:
    """A producer that sends on without credit is not kept in memory."""
    whole = np.zeros((4 << 20) // 4, np.uint32)
    part = pack("zstd", bytes(1 << 14), "uint32", whole.shape)
    assert part is not None

    def flood(req: XferReq) -> list[Any]:
        chunks = [packed(req, part.data, at, 1 << 14) for at in range(0, 4 << 20, 1 << 14)]
        return [[grant(req, whole, codec="zstd")], *chunks]

    liar.lie = flood
    with Consumer(
        **SMALL, planes=["zmq"], codecs=CODECS, chunk_size="16KiB", window="16KiB"
    ) as small:
        with pytest.raises(MismatchError):
            small.fetch("flood", liar.announce(whole), timeout=PATIENCE)
        attempt("packed lies of a producer")
