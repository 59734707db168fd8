# SPDX-License-Identifier: Apache-2.0
"""Copying out of a peer's mapped memory: real regions, and every reason not to trust them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from ec_connector.agent import same_host as module
from ec_connector.agent.same_host import Copied, SameHostPlane
from ec_connector.pool.blocks import BlockPool, Entry
from ec_connector.pool.region import Region
from ec_connector.protocol.effects import Address, CopyFromPeer
from ec_connector.protocol.shown import proof_of

BLOCKS, BLOCK = 16, 4096
THERE, ELSEWHERE = Address("127.0.0.1", 1), Address("127.0.0.1", 2)


class Bench:
    """A peer's region with bytes in it, our own region, and the plane between them."""

    def __init__(self) -> None:
        self.theirs = Region.create(BLOCKS * BLOCK, BLOCK)
        self.own = Region.create(BLOCKS * BLOCK, BLOCK)
        self.pool = BlockPool(BLOCKS, BLOCK)
        self.plane = SameHostPlane(self.own)
        rng = np.random.default_rng(1)
        self.theirs.buffer[:] = rng.integers(0, 255, BLOCKS * BLOCK, np.uint8).data
        self.theirs.set_generation(2, 7)

    def target(self, nbytes: int, key: str = "a") -> Entry:
        """Room of ours for so many bytes."""
        return self.pool.reserve(key, nbytes, "uint8", (nbytes,), owner=b"f", step=0, now=0.0)

    def copy(
        self,
        nbytes: int = 10_000,
        xfer_id: int = 1,
        extents: tuple[tuple[int, int], ...] = ((2, 4),),
        address: Address = THERE,
    ) -> CopyFromPeer:
        """A copy of the peer's item of generation 7, which begins at block 2."""
        target = self.target(nbytes, f"item {xfer_id}")
        proof = b""
        if all(start >= 0 for start, _ in extents):
            proof = proof_of(self.theirs.secret, 7, nbytes, extents)
        return CopyFromPeer(address, xfer_id, self.theirs.ref, extents, 7, proof, target)

    def run(self) -> list[Copied]:
        """Work until nothing is left to do."""
        ended = []
        while self.plane.busy():
            ended += self.plane.work()
        return ended

    def source(self, nbytes: int, extents: tuple[tuple[int, int], ...] = ((2, 4),)) -> bytes:
        """The bytes that belong into the target."""
        return b"".join(bytes(view) for view in self.theirs.views(extents, nbytes))

    def arrived(self, target: Entry) -> bytes:
        """The bytes that are there."""
        return b"".join(bytes(view) for view in self.own.views(target.extents, target.nbytes))

    def close(self) -> None:
        """Give all memory back."""
        self.plane.close()
        self.theirs.close()
        self.own.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Two regions of this process: mapping one's own works as mapping a peer's does."""
    bench = Bench()
    yield bench
    bench.close()


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK, 10_000, 4 * BLOCK])
def test_copy(bench: Bench, nbytes: int) -> None:
    """Byte for byte, and not one more."""
    effect = bench.copy(nbytes)
    bench.own.buffer[:] = bytes(BLOCKS * BLOCK)
    bench.plane.start(effect)
    assert bench.run() == [Copied(1, "")]
    assert bench.arrived(effect.target) == bench.source(nbytes)
    assert sum(1 for byte in bytes(bench.own.buffer) if byte) <= nbytes


def test_pieces_that_do_not_match(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Source and target may be cut differently, and slices end anywhere."""
    monkeypatch.setattr(module, "SLICE_BYTES", 1000)
    fillers = [bench.target(BLOCK, f"filler {number}") for number in range(BLOCKS)]
    for filler in fillers[::2]:
        bench.pool.abandon(filler.key, filler.generation)
    extents = ((2, 1), (9, 2), (5, 1))
    effect = bench.copy(3 * BLOCK + 5, extents=extents)
    assert len(effect.target.extents) == 4
    bench.plane.start(effect)
    assert bench.run() == [Copied(1, "")]
    assert bench.arrived(effect.target) == bench.source(3 * BLOCK + 5, extents)


def test_a_slice_at_a_time_and_each_in_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large copy does not hold up a small one."""
    monkeypatch.setattr(module, "SLICE_BYTES", BLOCK)
    bench.plane.start(bench.copy(4 * BLOCK, 1))
    bench.plane.start(bench.copy(1, 2))
    assert bench.plane.work() == []
    assert bench.plane.work() == [Copied(2, "")]
    assert bench.run() == [Copied(1, "")]


def test_overwritten_underneath(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed in the middle, or before the beginning: the copy is not good."""
    monkeypatch.setattr(module, "SLICE_BYTES", BLOCK)
    bench.plane.start(bench.copy(2 * BLOCK, 1))
    bench.plane.work()
    bench.theirs.set_generation(2, 0)
    (copied,) = bench.run()
    assert "overwritten" in copied.fault
    bench.theirs.set_generation(2, 8)
    bench.plane.start(bench.copy(10, 2))
    (copied,) = bench.run()
    assert "generation 8, 7 was granted" in copied.fault


@pytest.mark.parametrize(
    "extents",
    [
        (),
        ((2, 0),),
        ((2, 1),),
        ((-1, 4),),
        ((BLOCKS, 1), (2, 4)),
        ((2, BLOCKS),),
        ((2**62, 4),),
        ((2, 2**62),),
    ],
)
def test_extents_that_lie(bench: Bench, extents: tuple[tuple[int, int], ...]) -> None:
    """Nothing is read, and the fetch hears why."""
    bench.plane.start(bench.copy(2 * BLOCK, extents=extents))
    (copied,) = bench.run()
    assert copied.fault


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 0},
        {"pid": 2**40},
        {"pid": -1},
        {"fd": 2**40},
        {"fd": 0},
        {"fd": -1},
        {"token": "00" * 16},
        {"token": ""},
        {"nbytes": BLOCK},
        {"nbytes": 2**62},
        {"nbytes": 0},
        {"block_bytes": 0},
        {"block_bytes": 2 * BLOCK},
    ],
)
def test_regions_that_cannot_be_had(bench: Bench, change: dict[str, object]) -> None:
    """Another process, another descriptor, another size: the item comes another way."""
    effect = bench.copy()
    effect = replace(effect, region=msgspec.structs.replace(effect.region, **change))
    bench.plane.start(effect)
    (copied,) = bench.run()
    assert copied.fault
    assert copied.xfer_id == 1


def test_a_refusal_is_told_once_a_peer(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Peers on other hosts are the rule, not news; after a new connection it is said again."""
    for turn in range(3):
        effect = bench.copy(xfer_id=turn)
        bad = msgspec.structs.replace(effect.region, token="00" * 16)
        bench.plane.start(replace(effect, region=bad))
    assert len(bench.run()) == 3
    assert len(caplog.records) == 1
    bench.plane.forget(THERE)
    bench.plane.start(replace(bench.copy(xfer_id=9), region=bad))
    assert len(caplog.records) == 2


def test_stopped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one more byte is written, and nothing is told of it."""
    monkeypatch.setattr(module, "SLICE_BYTES", BLOCK)
    bench.plane.start(bench.copy(2 * BLOCK, 1))
    bench.plane.start(bench.copy(2 * BLOCK, 2))
    bench.plane.work()
    bench.plane.stop(1)
    bench.own.buffer[:BLOCK] = bytes(BLOCK)
    assert bench.run() == [Copied(2, "")]
    assert bytes(bench.own.buffer[:BLOCK]) == bytes(BLOCK)
    bench.plane.stop(99)
    assert not bench.plane.busy()


def test_peer_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies end in words, other peers' go on, and its memory is given back."""
    monkeypatch.setattr(module, "SLICE_BYTES", BLOCK)
    bench.plane.start(bench.copy(2 * BLOCK, 1))
    bench.plane.start(bench.copy(2 * BLOCK, 2, address=ELSEWHERE))
    assert mapped(bench.theirs) == 3
    bench.plane.forget(THERE)
    assert mapped(bench.theirs) == 2
    assert sorted(bench.run(), key=lambda copied: copied.xfer_id) == [
        Copied(1, "the peer is gone"),
        Copied(2, ""),
    ]
    bench.plane.forget(THERE)


def test_a_region_is_mapped_once_a_peer(bench: Bench) -> None:
    """And anew, the old one given back, when the peer's agent is another one."""
    for turn in range(5):
        bench.plane.start(bench.copy(10, turn))
        assert bench.run() == [Copied(turn, "")]
    assert mapped(bench.theirs) == 2
    other = Region.create(BLOCKS * BLOCK, BLOCK)
    other.set_generation(2, 7)
    try:
        bench.plane.start(bench.copy(10, 8))
        proof = proof_of(other.secret, 7, 10, ((2, 4),))
        bench.plane.start(replace(bench.copy(10, 9), region=other.ref, proof=proof))
        assert sorted(bench.run(), key=lambda copied: copied.xfer_id) == [
            Copied(8, "the peer is gone"),
            Copied(9, ""),
        ]
        assert (mapped(bench.theirs), mapped(other)) == (1, 2)
    finally:
        bench.plane.close()
        other.close()


def mapped(region: Region) -> int:
    """How often this process has a region mapped."""
    inode = os.fstat(region.ref.fd).st_ino
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum(line.split()[4] == str(inode) for line in maps if "memfd" in line)


@pytest.mark.parametrize("wrong", ["none", "cut", "of another item"])
def test_memory_is_not_read_without_its_owners_word(bench: Bench, wrong: str) -> None:
    """Whoever names blocks must prove that it may show them: nothing is copied before."""
    effect = bench.copy()
    proofs = {
        "none": b"",
        "cut": effect.proof[:-1],
        "of another item": proof_of(bench.theirs.secret, 7, 10_001, effect.extents),
    }
    bench.own.buffer[:] = bytes(BLOCKS * BLOCK)
    bench.plane.start(replace(effect, proof=proofs[wrong]))
    (copied,) = bench.run()
    assert "prove" in copied.fault
    assert not any(bench.own.buffer)
