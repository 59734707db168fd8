# SPDX-License-Identifier: Apache-2.0
"""Packed payload between two machines face to face: agreed, declined, damaged, given up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ec_connector.codecs.choice import EXACT, LOSS, LOSSY, LZ4, NONE, ZSTD
from ec_connector.protocol.connections import PEER_IDLE_SECONDS
from ec_connector.protocol.effects import SendToConsumer
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.messages import (
    XferAck,
    XferReq,
    XferStatus,
    decode_to_consumer,
    encode,
)
from ec_connector.testing import Pair
from ec_connector.testing.wiring import PRODUCER, Frame

pytest.importorskip("zstandard", reason="codec zstd; it is in the test extra")
pytest.importorskip("lz4.block", reason="codec lz4; it is in the test extra")

CHUNK = 4096
LARGE = 15_000
BOTH = (ZSTD, NONE)


def data(nbytes: int, seed: int = 1) -> bytes:
    """Bytes that shrink, of which no two runs are alike."""
    lines = (
        b"row %05d of a tensor; " % ((i * 131 + seed) % 99991) for i in range(nbytes // 22 + 1)
    )
    return b"".join(lines)[:nbytes]


def noise(nbytes: int) -> bytes:
    """Bytes that do not shrink."""
    import random

    return random.Random(nbytes).randbytes(nbytes)


def packed_frames(pair: Pair) -> list[int]:
    """Where in the queue to the consumer packed chunks stand."""
    pending = pair.transport.to_consumer.pending
    return [place for place, frame in enumerate(pending) if frame.packed is not None]


def until_packed(pair: Pair, count: int = 1) -> None:
    """Let things happen until so many packed chunks are on their way."""
    while len(packed_frames(pair)) < count:
        assert pair._turn()


def alter(pair: Pair, place: int = -1, packed: bytes | None = None, **fields: Any) -> None:
    """Let a packed chunk that is on its way say, or be, something else."""
    place = packed_frames(pair)[place]
    frame = pair.transport.to_consumer.drop(place)
    chunk = decode_to_consumer(frame.body)
    body = encode(msgspec.structs.replace(chunk, **fields))
    payload = frame.packed if packed is None else packed
    pair.transport.to_consumer.send(Frame(frame.peer, body, packed=payload))
    pair.transport.to_consumer.reorder(len(pair.transport.to_consumer) - 1, place)


def settle(pair: Pair) -> None:
    """Let every lease, deadline and idle peer pass, and look at what is left."""
    pair.hold_copies = False
    pair.advance(PEER_IDLE_SECONDS * 3)
    pair.validate()
    for pool in (pair.producer_pool, pair.consumer_pool):
        usage = pool.usage()
        assert (usage.pinned, usage.saving) == (0, 0)
    assert pair.producer.gauges() == {"grants": 0, "parked_now": 0}
    assert pair.consumer.gauges() == {"fetching": 0, "waiting_for_room": 0, "peers": 0}
    assert pair._unpacks == []


def pair_of(codecs: tuple[str, ...] = BOTH, there: tuple[str, ...] | None = None) -> Pair:
    """A consumer with these codecs, and a producer with them or with those."""
    return Pair(consumer_codecs=codecs, producer_codecs=codecs if there is None else there)


# ── it works ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("codec", [ZSTD, LZ4])
@pytest.mark.parametrize("nbytes", [600, CHUNK, CHUNK + 1, LARGE])
def test_bytes_arrive(codec: str, nbytes: int) -> None:
    """In fewer bytes, and the same after unpacking."""
    pair = pair_of((codec, NONE))
    pair.save("a", data(nbytes))
    pair.fetch("a", nbytes)
    until_packed(pair)
    pair.run()
    ready = pair.ready("a")
    assert pair.bytes_of(ready) == data(nbytes)
    assert ready.plane == "zmq"
    assert 0 < pair.consumer.counts["packed_bytes_received"] < nbytes
    assert pair.consumer.counts["bytes_received"] == nbytes
    assert pair.producer.counts[f"codec_{codec}"] == 1
    pair.release("a")
    settle(pair)


def test_runs_that_do_not_shrink_come_as_they_are() -> None:
    """Between runs that do, and in the right place."""
    content = data(CHUNK) + noise(CHUNK) + data(CHUNK, 7)
    pair = pair_of()
    pair.save("a", content)
    pair.fetch("a", len(content))
    pair.hold_copies = True  # the middle one lands before the first is unpacked
    pair.run()
    assert pair.of_key("a") == []
    pair.hold_copies = False
    pair.run()
    assert pair.bytes_of(pair.ready("a")) == content
    assert pair.consumer.counts["bytes_received"] == len(content)


def test_an_item_of_no_bytes_needs_no_codec() -> None:
    """There is nothing to pack, whatever is allowed."""
    pair = pair_of((ZSTD,))
    pair.save("a", b"")
    pair.fetch("a", 0)
    pair.run()
    assert pair.bytes_of(pair.ready("a")) == b""


def test_the_first_that_both_have_is_used() -> None:
    """The consumer's order counts."""
    pair = pair_of((LZ4, ZSTD, NONE), (NONE, ZSTD))
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    pair.run()
    assert pair.bytes_of(pair.ready("a")) == data(LARGE)
    assert pair.producer.counts["codec_zstd"] == 1


def test_shared_memory_needs_no_codec() -> None:
    """No link is passed, so nothing is packed, and nothing refused for want of a codec."""
    pair = Pair(planes=("memory", "zmq"), consumer_codecs=(ZSTD,), producer_codecs=(LZ4,))
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    pair.run()
    assert pair.ready("a").plane == "memory"


# ── it is declined ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("there", [(NONE,), (LZ4, NONE)])
def test_declined_codecs_leave_rows_as_they_are(there: tuple[str, ...]) -> None:
    """Where the consumer takes them so; it is counted."""
    pair = pair_of(BOTH, there)
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    pair.run()
    assert pair.bytes_of(pair.ready("a")) == data(LARGE)
    assert pair.consumer.counts["codecs_declined"] == 1
    assert pair.consumer.counts["packed_bytes_received"] == 0


@pytest.mark.parametrize(
    ("here", "there"), [((ZSTD,), (NONE,)), ((NONE,), (ZSTD,)), ((LZ4,), (ZSTD, NONE))]
)
def test_no_codec_in_common(here: tuple[str, ...], there: tuple[str, ...]) -> None:
    """Refused with both lists in the text."""
    pair = pair_of(here, there)
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    pair.run()
    failed = pair.failed("a")
    assert (failed.reason, failed.factor) == ("incompatible", "codecs")
    assert str(list(here)) in failed.message
    assert str(list(there)) in failed.message
    settle(pair)


def test_refused_after_the_wait_too() -> None:
    """A parked request that no codec suits is refused when the item is there."""
    pair = pair_of((ZSTD,), (NONE,))
    pair.reserve("a", LARGE)
    pair.fetch("a", LARGE)
    pair.run()
    assert pair.producer.gauges()["parked_now"] == 1
    pair.save("a", data(LARGE))
    pair.run()
    assert pair.failed("a").factor == "codecs"
    settle(pair)


def test_a_producer_that_knows_no_codecs() -> None:
    """It grants rows as they are; where those are not wanted, the grant is handed back."""
    pair = pair_of((ZSTD,))
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    pair.producer._codecs = (NONE,)
    pair.producer._no_codec = lambda *_: pytest.fail("never asked")  # type: ignore[method-assign]
    frame = pair.transport.to_producer.drop()
    pair.transport.to_producer.send(
        Frame(frame.peer, frame.body.replace(b"\xa6codecs", b"\xa6ignore"))
    )
    pair.run()
    failed = pair.failed("a")
    assert (failed.reason, failed.factor) == ("incompatible", "codecs")
    assert "codecs=['zstd']" in failed.message
    settle(pair)


@pytest.mark.parametrize(
    ("codecs", "status"), [(BOTH, XferStatus.OK), ((ZSTD,), XferStatus.NACK_INCOMPAT)]
)
def test_a_peer_of_base_fields(codecs: tuple[str, ...], status: XferStatus) -> None:
    """Gets rows as they are or a refusal, in base fields either way."""
    pair = pair_of(codecs)
    pair.save("a", data(LARGE))
    send = pair.producer.asked(b"peer", XferReq("a", "", "s"), 0.0)[0]
    assert isinstance(send, SendToConsumer)
    assert encode(send.message) == encode(XferAck("a", status, "s"))
    assert send.codec == ""
    assert (send.payload is None) == (status is not XferStatus.OK)
    assert pair.producer.gauges()["grants"] == 0


# ── loss is agreed on ────────────────────────────────────────────────────────


@pytest.mark.parametrize("lossy_here", [True, False])
def test_loss_on_one_side_alone_is_refused(lossy_here: bool) -> None:
    """Whoever serves may have lossy rows; whoever asks may not know."""
    loss = Identity(factors={LOSS: LOSSY})
    codecs = {"consumer": (LOSSY, NONE), "producer": (NONE,)}
    options: dict[str, Any] = {"consumer_identity": loss}
    if not lossy_here:
        codecs = {"consumer": (NONE,), "producer": (LOSSY, NONE)}
        options = {"producer_identity": loss}
    pair = Pair(consumer_codecs=codecs["consumer"], producer_codecs=codecs["producer"], **options)
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    pair.run()
    failed = pair.failed("a")
    assert (failed.reason, failed.factor) == ("incompatible", LOSS)
    assert LOSSY in failed.message
    assert repr(EXACT) in failed.message


def test_loss_on_both_sides() -> None:
    """Agreed; what is not rows of floats still comes whole."""
    loss = Identity(factors={LOSS: LOSSY})
    both = (LOSSY, NONE)
    pair = Pair(
        consumer_codecs=both, producer_codecs=both, consumer_identity=loss, producer_identity=loss
    )
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    pair.run()
    assert pair.bytes_of(pair.ready("a")) == data(LARGE)
    assert pair.producer.counts[f"codec_{LOSSY}"] == 0


# ── what arrives is not trusted ──────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"packed": b"\x28\xb5\x2f\xfd"}, "0 payload bytes"),
        ({"checksum": 1}, "damaged on the way"),
        ({"codec": LZ4}, "0 payload bytes"),
        ({"codec": NONE}, "0 payload bytes"),
        ({"codec": ""}, "payload bytes fit"),
        ({"packed_nbytes": CHUNK}, "0 payload bytes"),
        ({"nbytes": CHUNK + 1}, "0 payload bytes"),
        ({"offset": 1}, "0 payload bytes"),
    ],
)
def test_chunks_that_are_not_what_they_say(change: dict[str, Any], text: str) -> None:
    """The item fails, its grant is handed back, and nothing of it stays."""
    pair = pair_of()
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE, timeout=3.0)
    until_packed(pair)
    alter(pair, 0, **change)
    pair.run()
    failed = pair.failed("a")
    assert failed.reason == "mismatch"
    assert text in failed.message
    settle(pair)


def test_a_run_that_is_longer_than_it_says() -> None:
    """What it unpacks to is compared with what it says, not only with its place."""
    pair = pair_of()
    pair.save("a", data(CHUNK))
    pair.fetch("a", CHUNK)
    until_packed(pair)
    alter(pair, 0, nbytes=CHUNK - 1)
    pair.run()
    assert "unpacks to 4096 bytes where 4095 are due" in pair.failed("a").message
    settle(pair)


def test_damaged_bytes() -> None:
    """One bit is enough, and the peer, codec and place are named."""
    pair = pair_of()
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    until_packed(pair, 2)
    payload = pair.transport.to_consumer.pending[packed_frames(pair)[1]].packed
    assert payload is not None
    alter(pair, 1, packed=bytes([payload[0] ^ 1]) + payload[1:])
    pair.run()
    failed = pair.failed("a")
    assert failed.reason == "mismatch"
    assert f"bytes {CHUNK} to {2 * CHUNK}, zstd: damaged" in failed.message
    settle(pair)


@pytest.mark.parametrize("codec", [LZ4, NONE, LOSSY])
def test_an_ack_with_a_codec_that_was_not_offered(codec: str) -> None:
    """The producer is told that its grant is not wanted."""
    pair = pair_of()
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    while not len(pair.transport.to_consumer):
        assert pair._turn()
    frame = pair.transport.to_consumer.drop()
    ack = msgspec.structs.replace(decode_to_consumer(frame.body), codec=codec)
    pair.transport.to_consumer.send(Frame(frame.peer, encode(ack)))
    pair.transport.to_consumer.reorder(len(pair.transport.to_consumer) - 1)
    pair.run()
    assert pair.failed("a").reason == "mismatch"
    assert f"{codec!r}, which was not offered" in pair.failed("a").message
    settle(pair)


def test_payload_behind_an_ack_with_a_codec() -> None:
    """Not packed and not as it is: not taken."""
    pair = pair_of()
    pair.save("a", data(600))
    pair.fetch("a", 600)
    while not len(pair.transport.to_consumer):
        assert pair._turn()
    frame = pair.transport.to_consumer.drop()
    pair.transport.to_consumer.send(Frame(frame.peer, frame.body, packed=data(600)))
    pair.transport.to_consumer.reorder(len(pair.transport.to_consumer) - 1)
    pair.run()
    assert pair.failed("a").reason == "mismatch"
    settle(pair)


# ── it ends early ────────────────────────────────────────────────────────────


def test_given_up_while_it_is_unpacked() -> None:
    """What is unpacked later is not written: the room belongs to another item by then."""
    pair = Pair(blocks=4, consumer_codecs=BOTH, producer_codecs=BOTH)
    pair.save("a", data(3000))
    pair.fetch("a", 3000)
    pair.hold_copies = True
    pair.run()
    (job,) = pair._unpacks
    pair.release("a")
    assert pair._unpacks == []
    other = pair.consumer_pool.reserve(
        "b", 3000, "uint8", (3000,), owner=b"own", step=0, now=pair.clock.now
    )
    pair._here.write(other.extents, noise(3000))
    pair._unpack(job)  # as a thread that could not be stopped any more
    assert pair._here.read(other.extents, 3000) == noise(3000)
    assert pair.of_key("a") == []
    pair.consumer_pool.abandon("b", other.generation)
    settle(pair)


def test_connection_lost_while_it_is_unpacked() -> None:
    """Asked for anew; the leftovers of the first attempt do not count for the second."""
    pair = pair_of()
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    pair.hold_copies = True
    pair.run()
    old = list(pair._unpacks)
    assert old
    pair.partition()
    pair.advance(0.1)
    assert pair._unpacks == []
    for job in old:
        pair._unpack(job)
    pair.heal()
    pair.hold_copies = False
    pair.run()
    assert pair.bytes_of(pair.ready("a")) == data(LARGE)
    assert pair.consumer.counts["bytes_received"] == LARGE


def test_no_more_is_under_way_than_there_is_credit_for() -> None:
    """Credit counts the item's bytes, and comes when they are unpacked."""
    pair = pair_of()
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    pair.hold_copies = True
    pair.run()
    under_way = sum(job.chunk.nbytes for job in pair._unpacks)
    assert under_way == 2 * CHUNK
    last = pair._unpacks[-1].chunk
    more = msgspec.structs.replace(last, offset=last.offset + CHUNK)
    assert pair.consumer.landing(PRODUCER, more) is None
    pair.hold_copies = False
    pair.run()
    assert pair.bytes_of(pair.ready("a")) == data(LARGE)
