# SPDX-License-Identifier: Apache-2.0
"""A producer's and a consumer's machine face to face: every way for a transfer to go and to end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ec_connector.protocol.connections import PEER_IDLE_SECONDS
from ec_connector.protocol.effects import Address, SendToConsumer
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import FetchItem
from ec_connector.protocol.messages import XferAck, XferDone, XferReq, XferStatus, encode
from ec_connector.testing import Pair
from ec_connector.testing.wiring import PRODUCER, Frame

PLANES = [("zmq",), ("memory", "zmq")]
SMALL, LARGE = 700, 15_000  # bytes: in one message; in chunks, with credit several times


def data(nbytes: int, seed: int = 1) -> bytes:
    """Bytes of which no two runs are alike."""
    return bytes((i * 131 + i // 251 + seed * 29) % 256 for i in range(nbytes))


@pytest.fixture(params=PLANES, ids=lambda planes: planes[0])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both sides, valid in the end and with nothing held but what is evictable."""
    pair = Pair(planes=request.param)
    yield pair
    pair.validate()


def settle(pair: Pair) -> None:
    """Let every lease, deadline and idle peer pass, and look at what is left."""
    pair.heal()
    pair.advance(PEER_IDLE_SECONDS * 3)
    pair.validate()
    for pool in (pair.producer_pool, pair.consumer_pool):
        usage = pool.usage()
        assert (usage.pinned, usage.saving) == (0, 0)
    assert pair.producer.gauges() == {"grants": 0, "parked_now": 0}
    assert pair.consumer.gauges() == {"fetching": 0, "waiting_for_room": 0, "peers": 0}


@pytest.mark.parametrize("nbytes", [0, 1, SMALL, 1024, 4096, LARGE])
def test_bytes_arrive(pair: Pair, nbytes: int) -> None:
    """Whatever the size, what is delivered is what was saved."""
    pair.save("a", data(nbytes))
    pair.fetch("a", nbytes)
    pair.run()
    ready = pair.ready("a")
    assert pair.bytes_of(ready) == data(nbytes)
    assert (ready.dtype, ready.shape) == ("uint8", [nbytes])
    pair.release("a")
    settle(pair)


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_asked_before_it_is_saved(pair: Pair, nbytes: int) -> None:
    """A request for an item that is being saved is parked and answered by the save itself."""
    pair.reserve("a", nbytes)
    pair.fetch("a", nbytes)
    pair.run()
    assert pair.of_key("a") == []
    assert pair.producer.gauges()["parked_now"] == 1
    pair.save("a", data(nbytes))
    pair.run()
    assert pair.bytes_of(pair.ready("a")) == data(nbytes)
    assert pair.consumer.counts["requests_sent"] == 1


def test_many_clients_share_one_transfer(pair: Pair) -> None:
    """Each is answered, the producer is asked once, and the item stays until the last releases."""
    pair.save("a", data(LARGE))
    clients = [b"one", b"two", b"three"]
    for client in clients:
        pair.fetch("a", LARGE, client)
    pair.run()
    assert pair.consumer.counts["requests_sent"] == 1
    for client in clients:
        assert pair.bytes_of(pair.ready("a", client)) == data(LARGE)
        assert pair.consumer_pool.usage().pinned > 0
        pair.release("a", client)
    settle(pair)


def test_what_is_here_is_not_asked_for(pair: Pair) -> None:
    """A second fetch of an item in the pool moves nothing."""
    pair.save("a", data(SMALL))
    for _ in range(2):
        pair.fetch("a", SMALL)
        pair.run()
        pair.release("a")
    assert [answer.plane for answer in pair.of_key("a")][1:] == ["pool"]
    assert pair.consumer.counts["requests_sent"] == 1


def test_missing(pair: Pair) -> None:
    """Neither held nor being saved: said at once."""
    pair.fetch("a", SMALL)
    pair.run()
    assert pair.failed("a").reason == "missing"
    settle(pair)


def test_failed_save(pair: Pair) -> None:
    """The consumer is told at once, in the producer's words."""
    pair.reserve("a", SMALL)
    pair.fetch("a", SMALL)
    pair.run()
    pair.fail("a", "out of memory", "Traceback ...\nRuntimeError: out of memory")
    pair.run()
    failed = pair.failed("a")
    assert failed.reason == "remote_error"
    assert "out of memory" in failed.message
    assert "RuntimeError" in failed.message
    settle(pair)


def test_save_given_up(pair: Pair) -> None:
    """An engine that went past the step will not save it any more."""
    pair.reserve("a", SMALL, step=3)
    pair.fetch("a", SMALL)
    pair.run()
    pair.step_done(3)
    pair.run()
    assert pair.failed("a").reason == "missing"


def test_deadline_of_each(pair: Pair) -> None:
    """Those who wait for the same item each give up at their own deadline."""
    pair.reserve("a", SMALL)
    pair.fetch("a", SMALL, b"hasty", timeout=1.0)
    pair.fetch("a", SMALL, b"patient", timeout=3.0)
    pair.advance(1.5)
    assert pair.failed("a", b"hasty").reason == "deadline"
    assert pair.of_key("a", b"patient") == []
    pair.save("a", data(SMALL))
    pair.advance(1.0)
    assert pair.bytes_of(pair.ready("a", b"patient")) == data(SMALL)


def test_incompatible() -> None:
    """Factors that both know must agree; the one that differs is named."""
    pair = Pair(
        producer_identity=Identity(factors={"model": "m", "weights": "old"}),
        consumer_identity=Identity(factors={"model": "m", "weights": "new", "other": "x"}),
    )
    pair.save("a", data(SMALL))
    pair.fetch("a", SMALL)
    pair.run()
    failed = pair.failed("a")
    assert (failed.reason, failed.factor) == ("incompatible", "weights")
    assert "'old'" in failed.message
    assert "'new'" in failed.message


def test_incompatible_hash() -> None:
    """The four factors of the in-tree hash count too."""
    pair = Pair(producer_identity=Identity("aa"), consumer_identity=Identity("bb"))
    pair.save("a", data(SMALL))
    pair.fetch("a", SMALL)
    pair.run()
    assert pair.failed("a").factor == "compatibility_hash"


@pytest.mark.parametrize("version", [0, 2, 99])
def test_version(version: int) -> None:
    """A request of another wire version is refused, in the producer's words."""
    pair = Pair()
    pair.save("a", data(SMALL))
    req = XferReq("a", "", "s", version, xfer_id=1, planes=["zmq"], credit_bytes=4096)
    (effect,) = pair.producer.asked(b"peer", req, 0.0)
    assert isinstance(effect, SendToConsumer)
    assert isinstance(effect.message, XferAck)
    assert effect.message.status is XferStatus.NACK_VERSION
    assert str(version) in effect.message.message


def test_a_peer_of_base_fields_gets_base_fields() -> None:
    """To vLLM's own struct nothing is said that it does not know, and no lease stays behind."""
    pair = Pair()
    pair.save("a", data(SMALL))
    effects = pair.producer.asked(b"peer", XferReq("a", "", "s"), 0.0)
    send = effects[0]
    assert isinstance(send, SendToConsumer)
    assert send.payload is not None
    assert encode(send.message) == encode(XferAck("a", XferStatus.OK, "s"))
    assert pair.producer.gauges()["grants"] == 0


@pytest.mark.parametrize(
    ("nbytes", "dtype", "shape"),
    [(SMALL + 1, "uint8", [SMALL + 1]), (SMALL, "int8", [SMALL]), (SMALL, "uint8", [SMALL, 1])],
)
def test_what_is_held_is_not_what_was_announced(
    pair: Pair, nbytes: int, dtype: str, shape: list[int]
) -> None:
    """Nothing is written, the client is told, and the producer's grant is handed back."""
    pair.save("a", data(SMALL))
    item = FetchItem("a", 5000, PRODUCER.host, PRODUCER.port, nbytes, dtype, shape)
    pair._do(pair.consumer.fetch(b"client", item, pair.clock.now))
    pair.run()
    assert pair.failed("a").reason == "mismatch"
    assert pair.producer.gauges()["grants"] == 0
    settle(pair)


def test_torn_read_is_thrown_away() -> None:
    """Bytes overwritten under the copy are never delivered; the item comes another way or not."""
    pair = Pair(planes=("memory", "zmq"), lease=1.0)
    pair.save("a", data(LARGE))
    pair.hold_copies = True
    pair.fetch("a", LARGE, timeout=20.0)
    pair.run()
    pair.advance(1.5)  # the lease is over: the producer may reuse the blocks
    pair.save("b", data(LARGE, 2))
    assert pair.producer_pool.get("a") is None
    pair.hold_copies = False
    pair.run()
    assert pair.failed("a").reason == "missing"
    assert pair.consumer.counts["memory_plane_refused"] == 1
    settle(pair)


def test_without_shared_memory_zmq_is_used() -> None:
    """A region that cannot be mapped is no loss."""
    pair = Pair(planes=("memory", "zmq"))
    pair.can_map = False
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    pair.run()
    ready = pair.ready("a")
    assert ready.plane == "zmq"
    assert pair.bytes_of(ready) == data(LARGE)


def test_connection_lost_in_the_middle(pair: Pair) -> None:
    """The transfer starts anew when the connection is back, and ends right."""
    pair.save("a", data(LARGE))
    pair.hold_copies = True
    pair.fetch("a", LARGE)
    pair.transport.to_consumer.held = True
    pair.run()
    pair.partition()
    pair.transport.to_consumer.held = False
    pair.hold_copies = False
    pair.advance(0.5)
    assert pair.of_key("a") == []
    pair.heal()
    pair.run()
    assert pair.bytes_of(pair.ready("a")) == data(LARGE)
    pair.release("a")
    settle(pair)


def test_peer_that_stays_away(pair: Pair) -> None:
    """Fetches fail after connect_timeout, later ones at once, and it is tried again in the end."""
    pair.save("a", data(SMALL))
    pair.partition()
    pair.fetch("a", SMALL, timeout=30.0)
    pair.advance(1.9)
    assert pair.of_key("a") == []
    pair.advance(0.2)
    assert pair.failed("a").reason == "peer_unreachable"
    pair.fetch("a", SMALL, b"late", timeout=30.0)
    assert pair.failed("a", b"late").reason == "peer_unreachable"
    pair.heal()
    pair.run()
    pair.fetch("a", SMALL, b"again")
    pair.run()
    assert pair.bytes_of(pair.ready("a", b"again")) == data(SMALL)


def test_lost_ack_of_a_held_lease(pair: Pair) -> None:
    """A consumer that got no answer is no reason to keep an item for ever."""
    pair.save("a", data(SMALL))
    pair.fetch("a", SMALL, timeout=3.0)
    while not len(pair.transport.to_consumer):
        assert pair._turn()
    pair.transport.to_consumer.drop()
    pair.advance(4.0)
    assert pair.failed("a").reason == "deadline"
    settle(pair)


def test_answers_twice(pair: Pair) -> None:
    """An ack that arrives twice neither delivers twice nor ends the grant in use."""
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE)
    while not len(pair.transport.to_consumer):
        assert pair._turn()
    pair.transport.to_consumer.duplicate()
    pair.run()
    assert len(pair.of_key("a")) == 1
    assert pair.bytes_of(pair.ready("a")) == data(LARGE)


def test_foreign_answers_are_ignored(pair: Pair) -> None:
    """Acks for other sessions, transfers, items or from other peers change nothing."""
    pair.save("a", data(SMALL))
    pair.reserve("b", SMALL)
    pair.fetch("b", SMALL)
    pair.run()
    good = {"mm_hash": "b", "session_id": "consumer", "xfer_id": 1, "nbytes": SMALL}
    for change in ({"session_id": "x"}, {"xfer_id": 7}, {"mm_hash": "a"}):
        ack = XferAck(
            status=XferStatus.OK, dtype="uint8", shape=[SMALL], plane="zmq", **(good | change)
        )
        assert pair.consumer.landing(PRODUCER, ack) is None
        pair._do(pair.consumer.answered(PRODUCER, ack, SMALL, pair.clock.now))
    ack = XferAck(status=XferStatus.OK, dtype="uint8", shape=[SMALL], plane="zmq", **good)
    assert pair.consumer.landing(Address("other", 9), ack) is None
    pair._do(pair.consumer.answered(Address("other", 9), ack, SMALL, pair.clock.now))
    pair.run()
    assert pair.of_key("b") == []
    pair.validate()


def test_done_of_another_peer_ends_no_grant() -> None:
    """Only who got a grant can end it."""
    pair = Pair()
    pair.save("a", data(LARGE))
    req = XferReq("a", "", "s", xfer_id=5, planes=["zmq"], credit_bytes=4096, chunk_bytes=4096)
    pair.producer.asked(b"mine", req, 0.0)
    for peer, xfer_id in ((b"other", 5), (b"mine", 6)):
        pair._do(pair.producer.done(peer, XferDone("s", "a", xfer_id)))
        assert pair.producer.gauges()["grants"] == 1
    pair._do(pair.producer.done(b"mine", XferDone("s", "a", 5)))
    assert pair.producer.gauges()["grants"] == 0


def test_sessions_without_a_name_are_kept_apart() -> None:
    """Two peers of base fields and no session cannot end each other's grants."""
    pair = Pair()
    pair.save("a", data(LARGE))
    for peer in (b"one", b"two"):
        req = XferReq("a", "", xfer_id=1, planes=["zmq"], credit_bytes=4096, chunk_bytes=4096)
        pair.producer.asked(peer, req, 0.0)
    assert pair.producer.gauges()["grants"] == 2


def test_lease(pair: Pair) -> None:
    """A consumer that goes silent loses its pin after the lease."""
    pair.save("a", data(LARGE))
    pair.transport.to_consumer.held = True
    pair.hold_copies = True
    pair.fetch("a", LARGE, timeout=100.0)
    pair.run()
    assert pair.producer_pool.usage().pinned > 0
    pair.transport.lose_all()
    pair.partition()
    pair.advance(31.0)
    assert pair.producer_pool.usage().pinned == 0
    settle(pair)


def test_full_pool_of_the_consumer(pair: Pair) -> None:
    """An item waits for room until its deadline, and is fetched when there is some."""
    for key in "ab":
        pair.save(key, data(8 * 1024, ord(key)))
        pair.fetch(key, 8 * 1024)
        pair.run()
    pair.save("c", data(SMALL))
    pair.fetch("c", SMALL, b"hasty", timeout=1.0)
    pair.fetch("c", SMALL, b"patient", timeout=9.0)
    pair.advance(2.0)
    assert pair.failed("c", b"hasty").reason == "pool_full"
    pair.release("a")
    pair.run()
    assert pair.bytes_of(pair.ready("c", b"patient")) == data(SMALL)


def test_item_larger_than_the_consumers_pool(pair: Pair) -> None:
    """It will never fit, so nobody waits for it."""
    pair.fetch("a", 17 * 1024)
    pair.run()
    failed = pair.failed("a")
    assert failed.reason == "pool_full"
    assert "whole pool" in failed.message


def test_too_many_parked() -> None:
    """Beyond the limit a consumer is told to come again, and does until its deadline."""
    pair = Pair(max_parked=1)
    for key in "ab":
        pair.reserve(key, SMALL)
        pair.fetch(key, SMALL, timeout=5.0)
    pair.run()
    assert pair.producer.counts["nack_not_ready"] >= 1
    for key in "ab":
        pair.save(key, data(SMALL, ord(key)))
    pair.advance(2.0)
    assert all(pair.bytes_of(pair.ready(key)) == data(SMALL, ord(key)) for key in "ab")


def test_too_many_peers() -> None:
    """The number of connections is capped, and the refusal says by what."""
    pair = Pair(max_peers=1)
    pair.fetch("a", SMALL)
    item = FetchItem("b", 5000, "elsewhere", 2, SMALL, "uint8", [SMALL])
    pair._do(pair.consumer.fetch(b"client", item, 0.0))
    failed = pair.failed("b")
    assert failed.reason == "peer_refused"
    assert "max_peers" in failed.message


def test_a_client_that_ends_takes_nothing_along(pair: Pair) -> None:
    """What it held or waited for is let go; others keep theirs."""
    pair.save("a", data(SMALL))
    pair.reserve("b", SMALL)
    for client in (b"gone", b"stays"):
        pair.fetch("a", SMALL, client)
        pair.fetch("b", SMALL, client)
    pair.run()
    pair._do(pair.consumer.client_gone(b"gone", pair.clock.now))
    pair.save("b", data(SMALL, 2))
    pair.run()
    assert len(pair.of_key("b", b"gone")) == 0
    assert pair.bytes_of(pair.ready("b", b"stays")) == data(SMALL, 2)
    for key in "ab":
        pair.release(key, b"stays")
    settle(pair)


def test_weights_changed_in_mid_fetch(pair: Pair) -> None:
    """What was on its way is given up on both sides."""
    pair.reserve("a", SMALL)
    pair.fetch("a", SMALL)
    pair.run()
    pair.producer_pool.drop_all()
    pair._do(pair.producer.drop_all())
    pair.run()
    assert pair.failed("a").reason == "missing"


def test_key_with_new_content_replaces_the_old(pair: Pair) -> None:
    """A key that a client chose twice never gives one's bytes to the other."""
    pair.save("a", data(SMALL))
    pair.fetch("a", SMALL, b"one")
    pair.run()
    assert pair.reserve("a", 900, replace=True) == ""
    pair.save("a", data(900, 5))
    pair.fetch("a", 900, b"two")
    pair.run()
    assert pair.bytes_of(pair.ready("a", b"one")) == data(SMALL)
    assert pair.bytes_of(pair.ready("a", b"two")) == data(900, 5)
    pair.release("a", b"one")
    pair.release("a", b"two")
    settle(pair)


def test_garbled_place_of_a_frame(pair: Pair) -> None:
    """A chunk out of order is thrown away; the transfer ends by its deadline, not wrongly."""
    if pair.consumer._planes[0] == "memory":
        pytest.skip("no chunks through shared memory")
    pair.save("a", data(LARGE))
    pair.fetch("a", LARGE, timeout=3.0)
    while len(pair.transport.to_consumer) < 3:
        assert pair._turn()
    pair.transport.to_consumer.reorder(2, 1)
    pair.advance(4.0)
    assert pair.failed("a").reason in ("deadline", "mismatch")
    settle(pair)


def test_frame_is_what_travels() -> None:
    """The pair's messages are real frames: what cannot be encoded cannot be sent."""
    assert Frame(b"p", encode(XferDone("s", "a", 1))).body.startswith(b"\x84")
