# SPDX-License-Identifier: Apache-2.0
"""Packing beside the loop: order, limits, what is dropped, and libraries that fail."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ec_connector.agent import packing as module
from ec_connector.agent.packing import (
    MOST_STARTED,
    Packer,
    Unpacker,
    Workers,
    codecs_here,
    with_loss,
)
from ec_connector.agent.reactor import Reactor
from ec_connector.codecs import work
from ec_connector.codecs.choice import LOSS, LOSSY, NONE, ZSTD
from ec_connector.codecs.work import Packed, pack
from ec_connector.errors import ConfigError, InternalError
from ec_connector.pool.blocks import BlockPool
from ec_connector.pool.region import Region
from ec_connector.protocol.effects import SendToConsumer, Span, Unpack
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.messages import XferChunk

pytest.importorskip("zstandard", reason="codec zstd; it is in the test extra")

BLOCK = 4096
PATIENCE = 10.0


class Desk:
    """A pool with one item of many blocks, and threads that pack its blocks."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.workers = Workers(self.reactor)
        self.region = Region.create(16 * BLOCK, BLOCK)
        pool = BlockPool(16, BLOCK)
        shape = (16, BLOCK)
        self.entry = pool.reserve("a", 16 * BLOCK, "uint8", shape, owner=b"", step=0, now=0.0)
        self.leaving: dict[bytes, int] = {}
        self.packer = Packer(self.region, self.workers, lambda: self.leaving)
        self.unpacker = Unpacker(self.workers)

    def chunk(self, number: int, grant: str = "one", peer: bytes = b"peer") -> SendToConsumer:
        """A block of the item, to be packed."""
        span = Span(self.entry, number * BLOCK, BLOCK)
        return SendToConsumer(peer, XferChunk("s", 1, number * BLOCK, BLOCK), span, grant, ZSTD)

    def get(self, next_: Callable[[], Any]) -> Any:
        """The next one that threads have done, waited for as the loop does."""
        until = time.monotonic() + PATIENCE
        while (found := next_()) is None:
            assert time.monotonic() < until
            self.reactor.turn(100)
        return found


@pytest.fixture
def desk() -> Iterator[Desk]:
    """Ended after the test, threads too."""
    desk = Desk()
    yield desk
    desk.workers.close()
    desk.region.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is packed before it is set."""
    event = threading.Event()

    def slow(*args: Any) -> Packed | None:
        assert event.wait(PATIENCE)
        return pack(*args)

    monkeypatch.setattr(work, "pack", slow)
    yield event
    event.set()


def test_in_order(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long each takes."""

    def uneven(codec: str, run: Any, dtype: str, shape: Any) -> Packed | None:
        time.sleep(0.01 * (run[0] % 3))
        return pack(codec, run, dtype, shape)

    monkeypatch.setattr(work, "pack", uneven)
    for number in range(16):
        desk.region.buffer[number * BLOCK] = 16 - number
        desk.packer.start(desk.chunk(number))
    for number in range(16):
        effect, packed = desk.get(desk.packer.next)
        assert effect.message.offset == number * BLOCK
        assert packed is not None
    assert desk.packer.next() is None


def test_few_are_started_ahead(desk: Desk, gate: threading.Event) -> None:
    """The others hold no memory, and go on by themselves."""
    for number in range(16):
        desk.packer.start(desk.chunk(number))
    assert len(desk.packer._started) == MOST_STARTED
    assert not desk.packer.held_up()
    gate.set()
    for _ in range(16):
        desk.get(desk.packer.next)


def test_nothing_is_packed_for_a_link_that_takes_nothing(desk: Desk) -> None:
    """Until packed bytes have left, of which the loop must look by itself."""
    desk.leaving = {b"peer": module.LEAVING_BYTES + 1}
    desk.packer.start(desk.chunk(0))
    assert desk.packer.next() is None
    assert desk.packer.held_up()
    desk.leaving = {}
    assert desk.get(desk.packer.next)[1] is not None
    assert not desk.packer.held_up()


def test_peers_take_turns(desk: Desk, gate: threading.Event) -> None:
    """Who wants little is not behind all of who wants much."""
    for number in range(12):
        desk.packer.start(desk.chunk(number, "large", b"one"))
    desk.packer.start(desk.chunk(15, "small", b"other"))
    gate.set()
    peers = [desk.get(desk.packer.next)[0].peer for _ in range(13)]
    assert peers.index(b"other") <= MOST_STARTED + 1


def test_a_slow_link_holds_up_nobody_else(desk: Desk) -> None:
    """Who has nothing on its way gets its turn, in its own order."""
    desk.leaving = {b"slow": module.LEAVING_BYTES + 1}
    for number in range(3):
        desk.packer.start(desk.chunk(number, "its", b"slow"))
        desk.packer.start(desk.chunk(number + 4, "other", b"quick"))
    offsets = [desk.get(desk.packer.next)[0].message.offset for _ in range(3)]
    assert offsets == [4 * BLOCK, 5 * BLOCK, 6 * BLOCK]
    assert desk.packer.next() is None
    desk.leaving = {}
    offsets = [desk.get(desk.packer.next)[0].message.offset for _ in range(3)]
    assert offsets == [0, BLOCK, 2 * BLOCK]


def test_what_is_dropped_is_not_handed_out(desk: Desk, gate: threading.Event) -> None:
    """Waiting or started; what still reads the item's bytes is told."""
    for number in range(8):
        desk.packer.start(desk.chunk(number, "one"))
    desk.packer.start(desk.chunk(9, "other"))
    reading = desk.packer.stop("one")
    assert 0 < len(reading) <= module.THREADS
    gate.set()
    effect, _ = desk.get(desk.packer.next)
    assert effect.grant == "other"
    assert all(future.done() for future in reading)
    assert desk.packer.next() is None


def test_a_library_that_fails(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows are good: they are sent as they are, and it is said."""

    def broken(*_: Any) -> Packed | None:
        raise MemoryError("none left")

    monkeypatch.setattr(work, "pack", broken)
    with caplog.at_level(logging.ERROR, "vllm.ec_connector.agent"):
        desk.packer.start(desk.chunk(3))
        effect, packed = desk.get(desk.packer.next)
    assert packed is None
    assert effect.payload.offset == 3 * BLOCK
    assert "mm_hash=a not packed with zstd (1 so far)" in caplog.text
    assert desk.packer.faults == 1


def test_a_chunk_without_bytes_is_a_mistake_here(desk: Desk) -> None:
    """No thread is asked."""
    with pytest.raises(InternalError):
        desk.packer.start(SendToConsumer(b"p", XferChunk("s", 1), None, "g", ZSTD))


def unpacking(data: bytes, checksum: int, nbytes: int, xfer_id: int = 1) -> Unpack:
    """A chunk that came."""
    chunk = XferChunk("s", 1, 0, nbytes, ZSTD, len(data), checksum)
    return Unpack(xfer_id, chunk, memoryview(data), "uint8", (nbytes,))


def test_unpacked_and_faults(desk: Desk) -> None:
    """Rows, or in words why there are none."""
    made = pack(ZSTD, bytes(5000), "uint8", [5000])
    assert made is not None
    desk.unpacker.start(unpacking(made.data, made.checksum, 5000))
    desk.unpacker.start(unpacking(made.data, made.checksum + 1, 5000))
    _, rows = desk.get(desk.unpacker.next)
    assert bytes(rows.value) == bytes(5000)
    assert rows.seconds > 0
    _, fault = desk.get(desk.unpacker.next)
    assert "damaged" in fault
    assert desk.unpacker.next() is None


def test_unpacking_that_goes_wrong_in_another_way(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a library raises ends the item, not the agent."""

    def broken(*_: Any) -> np.ndarray[Any, Any]:
        raise MemoryError("none left")

    monkeypatch.setattr(work, "unpack", broken)
    desk.unpacker.start(unpacking(b"x", 0, 10))
    assert desk.get(desk.unpacker.next)[1] == "MemoryError('none left')"


def test_unpacking_that_nobody_waits_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a thread is dropped."""
    event = threading.Event()

    def slow(*_: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert event.wait(PATIENCE)
        return np.zeros(10, np.uint8)

    monkeypatch.setattr(work, "unpack", slow)
    for xfer_id in (1, 1, 1, 1, 2):
        desk.unpacker.start(unpacking(b"x", 0, 10, xfer_id))
    desk.unpacker.stop(1)
    event.set()
    ids = [desk.get(desk.unpacker.next)[0].xfer_id for _ in range(3)]
    assert ids == [1, 1, 2]  # two had been started
    assert desk.unpacker.next() is None


def test_closing_waits_for_nobody_but_the_threads(gate: threading.Event) -> None:
    """What they are at is finished; the rest is dropped."""
    desk = Desk()
    for number in range(16):
        desk.packer.start(desk.chunk(number))
    threading.Timer(0.05, gate.set).start()
    desk.workers.close()
    desk.region.close()


def test_codecs_that_lack_their_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Named with what to install; the others are used."""
    monkeypatch.setitem(__import__("sys").modules, "lz4", None)
    with caplog.at_level(logging.WARNING, "vllm.ec_connector.agent"):
        assert codecs_here(["lz4", ZSTD, NONE]) == (ZSTD, NONE)
    assert "codec lz4 is not used" in caplog.text
    assert "ec-connector[lz4]" in caplog.text


def test_loss_goes_into_the_identity(caplog: pytest.LogCaptureFixture) -> None:
    """As a factor, so that peers can refuse it, and into the log."""
    with caplog.at_level(logging.WARNING, "vllm.ec_connector.agent"):
        codecs_here([LOSSY])
    assert "near, not equal" in caplog.text
    identity = Identity("hash", {"model": "m"})
    assert with_loss(identity, [ZSTD]) is identity
    assert with_loss(identity, [LOSSY]) == Identity("hash", {"model": "m", LOSS: LOSSY})
    with pytest.raises(ConfigError, match="contradicts codecs"):
        with_loss(Identity(factors={LOSS: "none"}), [LOSSY])
