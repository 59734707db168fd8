# SPDX-License-Identifier: Apache-2.0
"""The producer's machine alone: each event, and exactly what it answers."""

from __future__ import annotations

import msgspec
import pytest

from ec_connector.pool.blocks import BlockPool
from ec_connector.protocol.effects import Effect, EndGrant, SendToConsumer
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.messages import (
    EC_CONNECTOR_VERSION,
    MAX_EXTENTS,
    MAX_TEXT_CHARS,
    RegionRef,
    XferAck,
    XferChunk,
    XferCredit,
    XferDone,
    XferReq,
    XferStatus,
    decode_to_consumer,
    decode_to_producer,
    encode,
)
from ec_connector.protocol.producer import (
    MAX_CHUNK_BYTES,
    MAX_GRANTS_OF_PEER,
    MIN_CHUNK_BYTES,
    ProducerMachine,
)

BLOCKS, BLOCK = 64, 1024
LEASE = 30.0
REGION = RegionRef(1, 3, BLOCKS * BLOCK, BLOCK, "00" * 16)
ME, OTHER = b"me", b"other"


class Bench:
    """A machine and its pool, with pins ended as an agent ends them: at once."""

    def __init__(
        self, identity: Identity | None = None, *, block_bytes: int = BLOCK, **options: object
    ) -> None:
        self.pool = BlockPool(BLOCKS, block_bytes)
        self.machine = ProducerMachine(
            self.pool,
            identity or Identity(),
            REGION,
            **{"lease": LEASE, "planes": ("memory", "zmq"), **options},
        )

    def save(self, key: str = "a", nbytes: int = 100, now: float = 0.0) -> list[Effect]:
        """Reserve and commit in one go."""
        return self.commit(key, self.reserve(key, nbytes), now)

    def reserve(self, key: str = "a", nbytes: int = 100) -> int:
        """Begin a save; returns its generation."""
        entry = self.pool.reserve(key, nbytes, "uint8", (nbytes,), owner=b"e", step=0, now=0.0)
        return entry.generation

    def commit(self, key: str, generation: int, now: float = 0.0) -> list[Effect]:
        """End a save."""
        assert self.pool.commit(key, generation, now) is not None
        return self.done(self.machine.saved(key, now))

    def ask(self, peer: bytes = ME, now: float = 0.0, **fields: object) -> list[Effect]:
        """A request, by default for the whole of item "a" over ZMQ."""
        fields = {
            "mm_hash": "a",
            "compatibility_hash": "",
            "session_id": "s",
            "xfer_id": 1,
            "planes": ["zmq"],
            "credit_bytes": 1 << 20,
            "chunk_bytes": 1 << 20,
            "timeout_ms": 1000,
        } | fields
        req = decode_to_producer(encode(XferReq(**fields)))
        assert isinstance(req, XferReq)
        return self.done(self.machine.asked(peer, req, now))

    def done(self, effects: list[Effect]) -> list[Effect]:
        """Unpin what ended, and check that each message can be sent and read."""
        for effect in effects:
            if isinstance(effect, EndGrant):
                assert self.pool.unpin(effect.entry.generation, effect.grant, 0.0)
            else:
                assert isinstance(effect, SendToConsumer)
                body = encode(effect.message)
                assert len(body) < 1024 or effect.message.traceback or effect.message.message
                assert decode_to_consumer(body) == effect.message
                if effect.payload is not None:
                    assert effect.grant
        self.machine.validate()
        self.pool.validate()
        return effects


@pytest.fixture
def bench() -> Bench:
    """Both planes, nothing known of the engine."""
    return Bench()


def ack_of(effects: list[Effect]) -> XferAck:
    """The one answer among these."""
    (ack,) = [
        effect.message
        for effect in effects
        if isinstance(effect, SendToConsumer) and isinstance(effect.message, XferAck)
    ]
    return ack


def chunks_of(effects: list[Effect]) -> list[tuple[int, int]]:
    """Offset and length of each chunk."""
    return [
        (effect.message.offset, effect.message.nbytes)
        for effect in effects
        if isinstance(effect, SendToConsumer) and isinstance(effect.message, XferChunk)
    ]


# ── the gate ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("version", "status"),
    [(None, XferStatus.OK), (1, XferStatus.OK), (2, XferStatus.NACK_VERSION)],
)
def test_a_frame_without_a_version_is_of_version_1(
    bench: Bench, version: int | None, status: XferStatus
) -> None:
    """Whatever our own version will be: the gate never fills in its own."""
    assert EC_CONNECTOR_VERSION == 1
    bench.save()
    frame = {"type": "req", "mm_hash": "a", "compatibility_hash": "", "session_id": "s"}
    if version is not None:
        frame["connector_version"] = version
    req = decode_to_producer(msgspec.msgpack.encode(frame))
    assert isinstance(req, XferReq)
    assert req.connector_version == (version or 1)
    assert ack_of(bench.done(bench.machine.asked(ME, req, 0.0))).status is status


def test_a_newer_producer_refuses_an_absent_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The day the wire changes, old peers that never name theirs are turned away."""
    bench = Bench()
    bench.save()
    monkeypatch.setattr("ec_connector.protocol.producer.EC_CONNECTOR_VERSION", 2)
    frame = {"type": "req", "mm_hash": "a", "compatibility_hash": ""}
    req = decode_to_producer(msgspec.msgpack.encode(frame))
    assert isinstance(req, XferReq)
    ack = ack_of(bench.done(bench.machine.asked(ME, req, 0.0)))
    assert ack.status is XferStatus.NACK_VERSION


def test_the_gate_comes_before_the_item(bench: Bench) -> None:
    """A peer of another kind does not learn what is held."""
    bench = Bench(Identity(factors={"model": "a"}))
    ack = ack_of(bench.ask(fingerprint={"model": "b"}))
    assert (ack.status, ack.factor) == (XferStatus.NACK_INCOMPAT, "model")
    bench.save()
    assert ack_of(bench.ask(fingerprint={"model": "b"})).status is XferStatus.NACK_INCOMPAT
    assert ack_of(bench.ask(fingerprint={"model": "a"})).status is XferStatus.OK
    assert bench.machine.counts["nack_incompat"] == 2


def test_unknown_factors_are_not_compared() -> None:
    """Neither those that the consumer does not send, nor those that are unknown here."""
    bench = Bench(Identity("aa", {"model": "a"}))
    bench.save()
    for fields in ({}, {"fingerprint": {"new": "x"}}, {"compatibility_hash": "aa"}):
        assert ack_of(bench.ask(**fields)).status is XferStatus.OK


# ── grants ───────────────────────────────────────────────────────────────────


def test_small_item_rides_behind_the_ack(bench: Bench) -> None:
    """One message, and a pin until the consumer says done."""
    bench.save(nbytes=100)
    (effect,) = bench.ask()
    assert isinstance(effect, SendToConsumer)
    assert effect.payload is not None
    assert (effect.payload.offset, effect.payload.nbytes) == (0, 100)
    assert bench.pool.usage().pinned == 1
    bench.done(bench.machine.done(ME, XferDone("s", "a", 1)))
    assert bench.pool.usage().pinned == 0


def test_never_more_than_the_credit(bench: Bench) -> None:
    """Whole chunks while there is credit; more of it goes on where the last one ended."""
    bench.save(nbytes=20_000)
    effects = bench.ask(credit_bytes=8192, chunk_bytes=4096)
    assert chunks_of(effects) == [(0, 4096), (4096, 4096)]
    more = bench.machine.credited(ME, XferCredit("s", "a", 1, 4095), 1.0)
    assert chunks_of(more) == []
    more = bench.machine.credited(ME, XferCredit("s", "a", 1, 1 << 20), 1.0)
    assert chunks_of(more) == [(8192, 4096), (12288, 4096), (16384, 3616)]
    assert bench.machine.credited(ME, XferCredit("s", "a", 1, 1 << 20), 1.0) == []


@pytest.mark.parametrize(("asked", "sent"), [(1, MIN_CHUNK_BYTES), (1 << 40, MAX_CHUNK_BYTES)])
def test_chunk_size_is_kept_within_limits(asked: int, sent: int) -> None:
    """Neither a flood of tiny messages nor one that fills the memory."""
    bench = Bench(block_bytes=1 << 20)
    bench.save(nbytes=40 << 20)
    effects = bench.ask(chunk_bytes=asked, credit_bytes=sent * 2 + 1)
    assert chunks_of(effects) == [(0, sent), (sent, sent)]


def test_credit_of_others_is_ignored(bench: Bench) -> None:
    """Of another peer, another transfer, another session, or without a grant."""
    bench.save(nbytes=20_000)
    bench.ask(credit_bytes=4096, chunk_bytes=4096)
    for peer, credit in (
        (OTHER, XferCredit("s", "a", 1, 9000)),
        (ME, XferCredit("s", "a", 2, 9000)),
        (ME, XferCredit("x", "a", 1, 9000)),
        (ME, XferCredit("s", "b", 1, 9000)),
    ):
        assert bench.machine.credited(peer, credit, 1.0) == []


def test_memory_is_offered_where_both_know_it(bench: Bench) -> None:
    """The ack says where, and no payload goes out."""
    bench.save(nbytes=20_000)
    (effect,) = bench.ask(planes=["memory", "zmq"])
    assert isinstance(effect, SendToConsumer)
    assert effect.payload is None
    ack = ack_of([effect])
    entry = bench.pool.get("a")
    assert entry is not None
    assert (ack.plane, ack.region) == ("memory", REGION)
    assert (ack.extents, ack.generation) == (list(entry.extents), entry.generation)
    assert ack_of(bench.ask(planes=["zmq"])).plane == "zmq"
    only_zmq = Bench(planes=("zmq",))
    only_zmq.save()
    assert ack_of(only_zmq.ask(planes=["memory", "zmq"])).plane == "zmq"


def test_an_item_in_many_pieces_goes_over_zmq(bench: Bench) -> None:
    """Its list of pieces would make the ack long."""
    for number in range(BLOCKS):
        bench.save(f"filler {number}", BLOCK)
    for number in range(1, BLOCKS, 2):
        bench.pool.pin(f"filler {number}", "keeper", None, 0.0)
    bench.save(nbytes=(MAX_EXTENTS + 1) * BLOCK)
    entry = bench.pool.get("a")
    assert entry is not None
    assert len(entry.extents) > MAX_EXTENTS
    assert ack_of(bench.ask(planes=["memory", "zmq"])).plane == "zmq"


def test_asking_again_replaces_the_grant(bench: Bench) -> None:
    """A consumer that lost the answer has one pin, not two, and the old transfer gets no more."""
    bench.save(nbytes=20_000)
    bench.ask(xfer_id=1, credit_bytes=4096, chunk_bytes=4096)
    again = bench.ask(xfer_id=2, credit_bytes=4096, chunk_bytes=4096)
    assert isinstance(again[0], EndGrant)
    assert chunks_of(again) == [(0, 4096)]
    assert bench.machine.gauges()["grants"] == 1
    assert bench.machine.credited(ME, XferCredit("s", "a", 1, 9000), 0.0) == []
    assert bench.machine.done(ME, XferDone("s", "a", 1)) == []
    assert len(bench.done(bench.machine.done(ME, XferDone("s", "a", 2)))) == 1
    assert bench.pool.usage().pinned == 0


def test_a_refused_second_request_ends_the_grant_too(bench: Bench) -> None:
    """Whatever the answer is, it is the answer to the last request."""
    bench.save()
    bench.ask()
    bench.ask(connector_version=9)
    assert bench.machine.gauges()["grants"] == 0
    assert bench.pool.usage().pinned == 0


def test_a_new_session_does_not_touch_the_old(bench: Bench) -> None:
    """A consumer that was started anew gets its own grant; the old one ends by its lease."""
    bench.save(nbytes=20_000)
    bench.ask(session_id="before", credit_bytes=4096)
    bench.ask(session_id="after", credit_bytes=4096, now=10.0)
    assert bench.machine.gauges()["grants"] == 2
    bench.done(bench.machine.tick(LEASE))
    assert bench.machine.gauges()["grants"] == 1
    bench.done(bench.machine.tick(LEASE + 10.0))
    assert bench.pool.usage().pinned == 0


def test_lease_runs_from_the_last_word(bench: Bench) -> None:
    """Credit shows that the consumer lives; silence ends the pin, at the moment promised."""
    bench.save(nbytes=20_000)
    bench.ask(credit_bytes=4096, chunk_bytes=4096)
    assert bench.machine.deadline() == LEASE
    bench.machine.credited(ME, XferCredit("s", "a", 1, 4096), 20.0)
    assert bench.done(bench.machine.tick(LEASE)) == []
    assert bench.machine.deadline() == 20.0 + LEASE
    (end,) = bench.done(bench.machine.tick(20.0 + LEASE))
    assert isinstance(end, EndGrant)
    assert bench.machine.counts["leases_expired"] == 1
    assert bench.machine.deadline() is None


def test_peer_gone(bench: Bench) -> None:
    """Its grants and parked requests end, and nobody else's."""
    bench.save()
    bench.reserve("b")
    for peer in (ME, OTHER):
        for key in "ab":
            bench.ask(peer, mm_hash=key, session_id=peer.decode(), timeout_ms=9000)
    assert bench.machine.gauges() == {"grants": 2, "parked_now": 2}
    (end,) = bench.done(bench.machine.peer_gone(ME))
    assert isinstance(end, EndGrant)
    assert bench.machine.gauges() == {"grants": 1, "parked_now": 1}
    assert bench.machine.peer_gone(ME) == []
    assert bench.machine.peer_gone(b"never seen") == []


# ── parking ──────────────────────────────────────────────────────────────────


def test_parked_until_the_save(bench: Bench) -> None:
    """Answered in the call that learns of it, all who wait, and nobody twice."""
    generation = bench.reserve()
    assert bench.ask(session_id="one") == []
    assert bench.ask(OTHER, session_id="two") == []
    effects = bench.commit("a", generation)
    assert [e.peer for e in effects if isinstance(e, SendToConsumer)] == [ME, OTHER]
    assert bench.machine.gauges() == {"grants": 2, "parked_now": 0}
    assert bench.machine.saved("a", 0.0) == []


def test_patience_is_the_consumers(bench: Bench) -> None:
    """Each is told when its own time is over, and may come again."""
    bench.reserve()
    bench.ask(session_id="hasty", timeout_ms=500)
    bench.ask(session_id="patient", timeout_ms=5000)
    assert bench.machine.deadline() == 0.5
    assert bench.machine.tick(0.4) == []
    ack = ack_of(bench.done(bench.machine.tick(0.5)))
    assert (ack.status, ack.session_id) == (XferStatus.NACK_NOT_READY, "hasty")
    assert bench.machine.gauges()["parked_now"] == 1


def test_failed_save(bench: Bench) -> None:
    """The writer's words and the end of its traceback, within what a message may hold."""
    bench.reserve()
    bench.ask()
    long = "x" * (2 * MAX_TEXT_CHARS) + "the cause"
    ack = ack_of(bench.done(bench.machine.lost("a", "out of memory" + long, long)))
    assert ack.status is XferStatus.NACK_INTERNAL
    assert ack.message.startswith("out of memory")
    assert ack.traceback.endswith("the cause")
    assert len(ack.message) == len(ack.traceback) == MAX_TEXT_CHARS


def test_save_given_up(bench: Bench) -> None:
    """Not a failure: it is merely not there, as for who asks later."""
    bench.reserve()
    bench.ask()
    ack = ack_of(bench.done(bench.machine.lost("a", "")))
    assert ack.status is XferStatus.NACK_MISSING
    assert bench.machine.lost("a", "") == []


def test_saved_and_gone_again(bench: Bench) -> None:
    """A ready item that was dropped before its news came grants nothing; who waits is told."""
    bench.reserve()
    bench.ask()
    (nack,) = bench.machine.saved("a", 0.0)
    assert isinstance(nack, SendToConsumer)
    assert nack.message.status is XferStatus.NACK_MISSING
    assert bench.machine.gauges() == {"grants": 0, "parked_now": 0}


def test_asking_again_while_parked(bench: Bench) -> None:
    """One request of a session waits at a time: the last."""
    generation = bench.reserve()
    bench.ask(xfer_id=1)
    bench.ask(xfer_id=2)
    assert bench.machine.gauges()["parked_now"] == 1
    assert ack_of(bench.commit("a", generation)).xfer_id == 2


def test_done_while_parked(bench: Bench) -> None:
    """Who gives up is answered no more; another peer or transfer cannot do it for it."""
    bench.reserve()
    bench.ask()
    for peer, xfer_id in ((OTHER, 1), (ME, 2)):
        bench.machine.done(peer, XferDone("s", "a", xfer_id))
        assert bench.machine.gauges()["parked_now"] == 1
    assert bench.machine.done(ME, XferDone("s", "a", 1)) == []
    assert bench.machine.gauges()["parked_now"] == 0
    assert bench.machine.tick(99.0) == []


def test_room_for_parked_is_bounded() -> None:
    """Beyond it the answer is to come again, at once; asking again takes no second place."""
    bench = Bench(max_parked=1)
    bench.reserve()
    bench.ask(session_id="one")
    assert bench.ask(session_id="one", xfer_id=2) == []
    ack = ack_of(bench.ask(session_id="two"))
    assert ack.status is XferStatus.NACK_NOT_READY
    assert "1 requests are parked" in ack.message


def test_parked_places_are_shared() -> None:
    """One peer may have them all; of one that has fewer, each takes one of his who has most."""
    bench = Bench(max_parked=4)
    bench.reserve()
    refused = [to_whom(bench.ask(ME, session_id=f"me {number}")) for number in range(5)]
    assert refused == [[], [], [], [], [(ME, "me 4")]]
    refused = [to_whom(bench.ask(OTHER, session_id=f"other {number}")) for number in range(3)]
    assert refused == [[(ME, "me 3")], [(ME, "me 2")], [(OTHER, "other 2")]]
    assert to_whom(bench.ask(b"a third", session_id="third")) == [(ME, "me 1")]
    assert bench.machine.gauges()["parked_now"] == 4
    bench.machine.peer_gone(OTHER)
    assert bench.machine.gauges()["parked_now"] == 2
    assert to_whom(bench.ask(ME, session_id="me again")) == []


def to_whom(effects: list[Effect]) -> list[tuple[bytes, str]]:
    """Peers and sessions that are told to come again, and nothing else is done."""
    told = []
    for effect in effects:
        assert isinstance(effect, SendToConsumer)
        assert isinstance(effect.message, XferAck)
        assert effect.message.status is XferStatus.NACK_NOT_READY
        assert "4 requests are parked already" in effect.message.message
        told.append((effect.peer, effect.message.session_id))
    return told


def test_no_request_waits_for_ever(bench: Bench) -> None:
    """However patient a consumer says it is."""
    bench.reserve()
    bench.ask(timeout_ms=2**62)
    ack = ack_of(bench.done(bench.machine.tick(601.0)))
    assert ack.status is XferStatus.NACK_NOT_READY


def test_weights_changed(bench: Bench) -> None:
    """All who wait are told, whatever they wait for."""
    for key in "ab":
        bench.reserve(key)
        bench.ask(mm_hash=key)
    bench.pool.drop_all()
    statuses = [e.message.status for e in bench.done(bench.machine.drop_all())]
    assert statuses == [XferStatus.NACK_MISSING] * 2
    assert bench.machine.gauges()["parked_now"] == 0


def test_own_session_does_not_wait_for_itself() -> None:
    """What this agent's own consumer asks for is what it is fetching: nobody would save it."""
    bench = Bench(own_session="mine")
    bench.reserve()
    assert ack_of(bench.ask(session_id="mine")).status is XferStatus.NACK_MISSING
    assert bench.ask(session_id="another") == []
    bench.save("b")
    assert ack_of(bench.ask(session_id="mine", mm_hash="b")).status is XferStatus.OK


def test_a_nack_to_a_peer_of_base_fields_has_base_fields(bench: Bench) -> None:
    """No message, no factor: its decoder may not know them."""
    ack = ack_of(bench.ask(planes=[], credit_bytes=0, mm_hash="none"))
    assert ack == XferAck("none", XferStatus.NACK_MISSING, "s")


# ── what one peer may hold ───────────────────────────────────────────────────


def test_one_peer_holds_so_many_items(bench: Bench) -> None:
    """Under whatever sessions; others are not concerned, and a place that is given back is free."""
    bench.save()
    for number in range(MAX_GRANTS_OF_PEER):
        bench.machine.asked(ME, XferReq("a", "", f"s{number}", planes=["memory"]), 0.0)
    assert ack_of(bench.ask()).status is XferStatus.NACK_NOT_READY
    assert ack_of(bench.ask(b"other", session_id="t")).status is XferStatus.OK
    # Asked again is no second one.
    assert ack_of(bench.ask(session_id="s7", planes=["memory"])).status is XferStatus.OK
    bench.done(bench.machine.done(ME, XferDone("s9", "a")))
    assert ack_of(bench.ask()).status is XferStatus.OK


def test_parked_requests_do_not_count(bench: Bench) -> None:
    """They have a limit of their own."""
    bench.reserve("b")
    bench.save()
    for number in range(MAX_GRANTS_OF_PEER):
        bench.machine.asked(ME, XferReq("b", "", f"s{number}", timeout_ms=1000), 0.0)
    assert ack_of(bench.ask()).status is XferStatus.OK


def test_who_does_not_read_is_told_to_come_again() -> None:
    """And gets what it asks for when it has read."""
    behind = {ME}
    bench = Bench(behind=behind.__contains__)
    bench.save()
    assert ack_of(bench.ask()).status is XferStatus.NACK_NOT_READY
    assert ack_of(bench.ask(b"other", session_id="t")).status is XferStatus.OK
    behind.clear()
    assert ack_of(bench.ask()).status is XferStatus.OK
