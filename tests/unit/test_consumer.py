# SPDX-License-Identifier: Apache-2.0
"""The consumer's machine alone: each event, and exactly what it answers."""

from __future__ import annotations

from typing import Any

import pytest

from ec_connector.pool.blocks import BlockPool, EntryState
from ec_connector.protocol.connections import PEER_IDLE_SECONDS
from ec_connector.protocol.consumer import MAX_BACKOFF, ConsumerMachine
from ec_connector.protocol.effects import (
    Address,
    Connect,
    CopyFromPeer,
    Disconnect,
    Effect,
    SendToProducer,
    StopCopy,
    Tell,
)
from ec_connector.protocol.fetch import FIRST_BACKOFF
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import Failed, FetchItem, Ready
from ec_connector.protocol.messages import (
    MAX_HASH_CHARS,
    MAX_RANK,
    RegionRef,
    XferAck,
    XferChunk,
    XferCredit,
    XferDone,
    XferReq,
    XferStatus,
    encode,
)
from ec_connector.protocol.tickets import Tickets

BLOCKS, BLOCK = 16, 1024
THERE, ELSEWHERE = Address("there", 1), Address("elsewhere", 2)
REGION = RegionRef(1, 3, BLOCKS * BLOCK, BLOCK, "00" * 16)
ME, OTHER = b"me", b"other"


class Bench:
    """A machine and its pool; both are valid after each event."""

    def __init__(self, **options: object) -> None:
        self.pool = BlockPool(BLOCKS, BLOCK)
        self.machine = ConsumerMachine(
            self.pool,
            Identity("hash", {"model": "m"}),
            "session",
            **{
                "planes": ("memory", "zmq"),
                "chunk_bytes": 4096,
                "window_bytes": 8192,
                "max_peers": 2,
                **options,
            },
        )

    def fetch(
        self, client: bytes = ME, now: float = 0.0, seconds: float = 5.0, **fields: Any
    ) -> list[Effect]:
        """A client asks, by default for 1000 bytes of item "a" from ``THERE``."""
        nbytes = fields.get("nbytes", 1000)
        fields = {
            "key": "a",
            "timeout_ms": int(seconds * 1000),
            "peer_host": THERE.host,
            "peer_port": THERE.port,
            "nbytes": nbytes,
            "dtype": "uint8",
            "shape": [nbytes],
        } | fields
        return self.checked(self.machine.fetch(client, FetchItem(**fields), now))

    def fetch_here(
        self, client: bytes = ME, now: float = 0.0, seconds: float = 5.0
    ) -> list[Effect]:
        """A client asks for item "a" of this pool, whatever it is."""
        item = FetchItem("a", int(seconds * 1000))
        return self.checked(self.machine.fetch(client, item, now))

    def reserve(self, key: str = "a", nbytes: int = 1000) -> int:
        """This engine itself begins to save an item; returns its generation."""
        entry = self.pool.reserve(key, nbytes, "uint8", (nbytes,), owner=b"e", step=0, now=0.0)
        return entry.generation

    def answer(
        self, xfer_id: int = 1, payload: int | None = None, now: float = 0.0, **fields: Any
    ) -> list[Effect]:
        """An ack from ``THERE``, by default a grant of what was asked for."""
        fields = {
            "mm_hash": "a",
            "status": XferStatus.OK,
            "session_id": "session",
            "xfer_id": xfer_id,
            "plane": "zmq",
            "nbytes": 1000,
            "dtype": "uint8",
            "shape": [1000],
        } | fields
        ack = XferAck(**fields)
        if payload is not None:
            place = self.machine.landing(THERE, ack)
            payload = payload if place is not None else 0
        return self.checked(self.machine.answered(THERE, ack, payload, now))

    def grant_memory(self, xfer_id: int = 1, **fields: Any) -> list[Effect]:
        """An ack that points into the peer's region."""
        fields = {
            "plane": "memory",
            "region": REGION,
            "extents": [(0, 1)],
            "generation": 4,
        } | fields
        return self.answer(xfer_id, **fields)

    def chunk(self, offset: int, nbytes: int, xfer_id: int = 1, now: float = 0.0) -> list[Effect]:
        """Payload from ``THERE``, taken as an agent takes it."""
        chunk = XferChunk("session", xfer_id, offset, nbytes)
        place = self.machine.landing(THERE, chunk)
        received = place.nbytes if place is not None else 0
        return self.checked(self.machine.arrived(THERE, chunk, received, now))

    def tick(self, now: float) -> list[Effect]:
        """Time passes."""
        return self.checked(self.machine.tick(now))

    def checked(self, effects: list[Effect]) -> list[Effect]:
        """Tables agree, and each message can be sent."""
        for effect in effects:
            if isinstance(effect, SendToProducer):
                encode(effect.message)
        self.machine.validate()
        self.pool.validate()
        return effects

    def empty(self) -> bool:
        """Whether nothing is left but what can be evicted."""
        gauges = self.machine.gauges()
        usage = self.pool.usage()
        return (gauges["fetching"], gauges["waiting_for_room"], usage.pinned, usage.saving) == (
            0, 0, 0, 0,
        )  # fmt: skip


@pytest.fixture
def bench() -> Bench:
    """Both planes."""
    return Bench()


def told(effects: list[Effect]) -> list[tuple[bytes, str]]:
    """Who was told what: a plane or a reason."""
    return [
        (e.client, e.message.plane if isinstance(e.message, Ready) else e.message.reason)
        for e in effects
        if isinstance(e, Tell) and isinstance(e.message, Ready | Failed)
    ]


def sent(effects: list[Effect], kind: type) -> list[Any]:
    """Messages of one type to producers."""
    return [
        e.message for e in effects if isinstance(e, SendToProducer) and isinstance(e.message, kind)
    ]


def words(effects: list[Effect]) -> str:
    """The text of the one failure."""
    (failed,) = [e.message for e in effects if isinstance(e, Tell)]
    assert isinstance(failed, Failed)
    return failed.message


# ── asking ───────────────────────────────────────────────────────────────────


def test_the_request(bench: Bench) -> None:
    """Everything that a producer needs to judge it, and how long it may be parked."""
    connect, send = bench.fetch(seconds=5.0)
    assert connect == Connect(THERE)
    assert isinstance(send, SendToProducer)
    req = send.message
    assert isinstance(req, XferReq)
    assert (req.mm_hash, req.session_id, req.xfer_id) == ("a", "session", 1)
    assert (req.compatibility_hash, req.fingerprint) == ("hash", {"model": "m"})
    assert (req.planes, req.chunk_bytes, req.credit_bytes) == (["memory", "zmq"], 4096, 8192)
    assert req.timeout_ms == 5000


@pytest.mark.parametrize(
    "fields",
    [
        {"nbytes": -1, "shape": [-1]},
        {"shape": [-5]},
        {"shape": [1] * (MAX_RANK + 1)},
    ],
)
def test_what_is_no_item(bench: Bench, fields: dict[str, Any]) -> None:
    """It is refused before anything is reserved or dialled."""
    assert told(bench.fetch(**fields)) == [(ME, "mismatch")]
    assert bench.empty()


def test_a_key_that_no_request_can_hold(bench: Bench) -> None:
    """The text names the limit; at the limit itself the item is asked for."""
    effects = bench.fetch(key="k" * (MAX_HASH_CHARS + 1))
    assert told(effects) == [(ME, "missing")]
    assert str(MAX_HASH_CHARS) in words(effects)
    assert len(sent(bench.fetch(key="k" * MAX_HASH_CHARS), XferReq)) == 1


def test_nowhere_to_ask(bench: Bench) -> None:
    """Without an address only this pool can have it."""
    assert told(bench.fetch_here()) == [(ME, "missing")]
    assert bench.empty()


def test_a_second_client_with_other_expectations(bench: Bench) -> None:
    """It fails alone; the transfer that is under way goes on."""
    bench.fetch()
    assert told(bench.fetch(OTHER, nbytes=999)) == [(OTHER, "mismatch")]
    assert told(bench.answer(payload=1000)) == [(ME, "zmq")]


def test_a_second_client_without_expectations(bench: Bench) -> None:
    """It takes what comes."""
    bench.fetch()
    assert bench.fetch_here(OTHER) == []
    assert told(bench.answer(payload=1000)) == [(ME, "zmq"), (OTHER, "zmq")]


def test_the_same_client_twice(bench: Bench) -> None:
    """One answer, by its later deadline; one release lets all go."""
    bench.fetch(seconds=1.0)
    bench.fetch(seconds=3.0)
    bench.machine.peer_up(THERE, 0.0)
    assert bench.tick(2.0) == []
    assert told(bench.answer(payload=1000)) == [(ME, "zmq")]
    bench.machine.release(ME, "a", 0.0)
    assert bench.empty()


def test_asking_a_peer_that_is_known_to_be_away(bench: Bench) -> None:
    """The wait is over for newcomers, too."""
    bench.fetch(seconds=30.0)
    bench.checked(bench.machine.peer_down(THERE, 0.5))
    assert told(bench.tick(2.0)) == [(ME, "peer_unreachable")]
    effects = bench.fetch(OTHER, now=3.0, seconds=30.0)
    assert told(effects) == [(OTHER, "peer_unreachable")]
    assert "3.0 s" in words(effects)
    assert bench.empty()


# ── items of this engine's own ───────────────────────────────────────────────


def test_an_item_that_is_being_saved_here(bench: Bench) -> None:
    """Nobody is asked; the save answers."""
    generation = bench.reserve()
    assert bench.fetch() == []
    assert bench.fetch_here(OTHER) == []
    assert bench.machine.saved("a", 0.0) == []  # news of something else of that name
    bench.pool.commit("a", generation, 1.0)
    effects = bench.checked(bench.machine.saved("a", 1.0))
    assert told(effects) == [(ME, "pool"), (OTHER, "pool")]
    (ready, _) = [e.message for e in effects if isinstance(e, Tell)]
    assert isinstance(ready, Ready)
    assert (ready.elapsed_us, ready.peer) == (1_000_000, "")
    assert bench.machine.saved("a", 1.0) == []


def test_its_save_is_given_up(bench: Bench) -> None:
    """Told at once."""
    generation = bench.reserve()
    bench.fetch()
    bench.pool.abandon("a", generation)
    assert told(bench.checked(bench.machine.lost("a"))) == [(ME, "missing")]
    assert bench.machine.lost("a") == []
    assert bench.empty()


def test_its_save_takes_too_long(bench: Bench) -> None:
    """Each has a deadline here, too, and none of it touches the save."""
    bench.reserve()
    bench.fetch(seconds=1.0)
    bench.fetch(OTHER, seconds=2.0)
    assert bench.machine.deadline() == 1.0
    assert told(bench.tick(1.0)) == [(ME, "deadline")]
    assert told(bench.tick(2.0)) == [(OTHER, "deadline")]
    entry = bench.pool.get("a")
    assert entry is not None
    assert entry.state is EntryState.SAVING


def test_it_turns_out_to_be_something_else(bench: Bench) -> None:
    """Bytes of another size are not delivered under a name that somebody chose twice."""
    generation = bench.reserve(nbytes=500)
    bench.fetch()
    assert told(bench.fetch(OTHER, nbytes=700)) == [(OTHER, "mismatch")]
    bench.pool.commit("a", generation, 0.0)
    assert told(bench.checked(bench.machine.saved("a", 0.0))) == [(ME, "mismatch")]
    assert bench.empty()


def test_its_end_is_no_news_to_a_transfer(bench: Bench) -> None:
    """What is asked of a producer is not ended by what this engine saves or gives up."""
    bench.fetch()
    assert bench.machine.lost("a") == []
    assert bench.machine.saved("a", 0.0) == []
    assert told(bench.answer(payload=1000)) == [(ME, "zmq")]


def test_other_content_in_the_pool_makes_way(bench: Bench) -> None:
    """The key is asked for where the wanted content is, and the old bytes go."""
    bench.pool.commit("a", bench.reserve(nbytes=500), 0.0)
    assert bench.fetch() == [Connect(THERE)]
    assert len(sent(bench.checked(bench.machine.peer_up(THERE, 0.1)), XferReq)) == 1
    assert told(bench.answer(payload=1000)) == [(ME, "zmq")]
    # Where the producer is connected already, at once.
    assert len(sent(bench.fetch(OTHER, nbytes=700), XferReq)) == 1


@pytest.mark.parametrize("end", ["refused", "unreachable", "deadline", "given up", "no ticket"])
def test_a_lying_announcement_evicts_nothing(end: str) -> None:
    """What is here stays, and is served meanwhile, until the announced producer is connected."""
    bench = Bench(tickets=Tickets([b"k" * 32]) if end == "no ticket" else None)
    bench.pool.commit("a", bench.reserve(nbytes=500), 0.0)
    effects = bench.fetch(seconds=1.0 if end == "deadline" else 5.0)
    assert sent(effects, XferReq) == []
    assert told(bench.fetch(OTHER, nbytes=500)) == [(OTHER, "pool")]
    if end == "refused":
        effects = bench.checked(bench.machine.peer_refused(THERE, "not allowed"))
    elif end == "given up":
        effects = bench.checked(bench.machine.release(ME, "a", 0.0))
    elif end != "no ticket":
        effects = bench.tick(1.5) + bench.tick(2.5)
    reason = {
        "refused": "peer_refused",
        "no ticket": "peer_refused",
        "unreachable": "peer_unreachable",
    }
    assert told(effects) == ([] if end == "given up" else [(ME, reason.get(end, end))])
    bench.checked(bench.machine.release(OTHER, "a", 3.0))
    assert told(bench.fetch(OTHER, nbytes=500, now=3.0)) == [(OTHER, "pool")]


def test_replaced_by_this_engine_before_its_producer_is_met(bench: Bench) -> None:
    """What the engine saves under that key meanwhile is looked at when the producer is there."""
    bench.pool.commit("a", bench.reserve(nbytes=500), 0.0)
    bench.fetch()
    bench.pool.drop("a")
    generation = bench.reserve()
    assert bench.checked(bench.machine.peer_up(THERE, 0.1)) == []
    bench.pool.commit("a", generation, 0.2)
    assert told(bench.checked(bench.machine.saved("a", 0.2))) == [(ME, "pool")]


def test_its_producer_goes_before_it_was_asked(bench: Bench) -> None:
    """A connection that comes, goes and comes again: the question is put once there is one."""
    bench.pool.commit("a", bench.reserve(nbytes=500), 0.0)
    bench.fetch()
    assert bench.checked(bench.machine.peer_down(THERE, 0.1)) == []
    assert len(sent(bench.checked(bench.machine.peer_up(THERE, 0.2)), XferReq)) == 1


def test_saved_here_while_it_waited_for_room(bench: Bench) -> None:
    """There is no need to ask any more."""
    filler = bench.reserve("filler", BLOCKS * BLOCK)
    assert sent(bench.fetch(), XferReq) == []
    assert bench.machine.gauges()["waiting_for_room"] == 1
    bench.pool.abandon("filler", filler)
    bench.pool.commit("a", bench.reserve(), 0.0)
    assert told(bench.checked(bench.machine.room(0.0))) == [(ME, "pool")]


def test_being_saved_here_while_it_waited_for_room(bench: Bench) -> None:
    """It is waited for here from then on."""
    filler = bench.reserve("filler", BLOCKS * BLOCK)
    bench.fetch()
    bench.pool.abandon("filler", filler)
    generation = bench.reserve()
    assert bench.checked(bench.machine.room(0.0)) == []
    assert bench.machine.gauges() == {"fetching": 1, "waiting_for_room": 0, "peers": 1}
    bench.pool.commit("a", generation, 0.0)
    assert told(bench.checked(bench.machine.saved("a", 0.0))) == [(ME, "pool")]


# ── answers ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (XferStatus.NACK_MISSING, "missing"),
        (XferStatus.NACK_INCOMPAT, "incompatible"),
        (XferStatus.NACK_VERSION, "version"),
        (XferStatus.NACK_INTERNAL, "remote_error"),
    ],
)
def test_refusals(bench: Bench, status: XferStatus, reason: str) -> None:
    """Each has its label, and a producer of base fields needs to give no text."""
    bench.fetch()
    effects = bench.answer(status=status, plane="", nbytes=0, dtype="", shape=[])
    assert told(effects) == [(ME, reason)]
    assert words(effects)
    assert sent(effects, XferDone) == []
    assert bench.empty()


def test_text_of_a_producer_commands_no_terminal(bench: Bench) -> None:
    """Message and traceback come through; escapes, and lines that a log would take for its own, do
    not.
    """
    bench.fetch()
    said = {"message": "no\x1b[2J\nERROR forged", "traceback": "Traceback:\n\tline\r\x07"}
    text = words(bench.answer(status=XferStatus.NACK_INTERNAL, **said))
    assert text == "no\ufffd[2J\ufffdERROR forged\nTraceback:\n\tline\ufffd\ufffd"


def test_every_status_is_dealt_with(bench: Bench) -> None:
    """One that is added later must not end in a KeyError."""
    for number, status in enumerate(XferStatus, start=1):
        bench.fetch()
        bench.answer(number, status=status, payload=1000)
        bench.machine.release(ME, "a", 0.0)
        bench.pool.drop("a")
        assert bench.empty()


def test_not_ready_is_asked_again_and_more_slowly(bench: Bench) -> None:
    """No storm: the pauses double, up to a second, and the deadline ends it."""
    bench.fetch(seconds=100.0)
    bench.machine.peer_up(THERE, 0.0)
    now, pauses = 0.0, []
    for turn in range(1, 10):
        bench.answer(turn, status=XferStatus.NACK_NOT_READY, now=now)
        again = bench.machine._retries.next()
        assert again is not None
        pauses.append(round(again - now, 3))
        now = again
        (req,) = sent(bench.tick(now), XferReq)
        assert req.xfer_id == turn + 1
    assert pauses[:3] == [FIRST_BACKOFF, 2 * FIRST_BACKOFF, 4 * FIRST_BACKOFF]
    assert pauses[-1] == MAX_BACKOFF
    assert told(bench.tick(100.0)) == [(ME, "deadline")]
    assert bench.empty()


@pytest.mark.parametrize(
    "fields",
    [{"nbytes": 999}, {"dtype": "int8"}, {"shape": [10, 100]}, {"shape": []}],
)
def test_a_grant_of_something_else(bench: Bench, fields: dict[str, Any]) -> None:
    """Its payload has no place, the text names both, and the grant goes back."""
    bench.fetch()
    effects = bench.answer(payload=1000, **fields)
    assert told(effects) == [(ME, "mismatch")]
    assert "1000" in words(effects)
    assert len(sent(effects, XferDone)) == 1
    assert bench.machine.counts["bytes_received"] == 0
    assert bench.empty()


@pytest.mark.parametrize("payload", [999, 1001, 0])
def test_a_payload_of_another_length(bench: Bench, payload: int) -> None:
    """Short or long, the item is not delivered and its room is free again."""
    bench.fetch()
    effects = bench.answer(payload=payload)
    assert told(effects) == [(ME, "mismatch")]
    assert len(sent(effects, XferDone)) == 1
    assert bench.pool.get("a") is None
    assert bench.empty()


def test_chunks(bench: Bench) -> None:
    """In order they add up; credit goes back in quarters of the window; done comes last."""
    bench.fetch(nbytes=9000)
    bench.answer(nbytes=9000, shape=[9000])
    (credit,) = sent(bench.chunk(0, 4096), XferCredit)
    assert credit.nbytes == 4096
    assert sent(bench.chunk(4096, 1000), XferCredit) == []
    (credit,) = sent(bench.chunk(5096, 2000), XferCredit)
    assert credit.nbytes == 3000
    effects = bench.chunk(7096, 1904)
    assert told(effects) == [(ME, "zmq")]
    assert len(sent(effects, XferDone)) == 1
    assert bench.machine.counts["bytes_received"] == 9000


def test_a_window_that_holds_the_bytes_up_grows(bench: Bench) -> None:
    """One that passes in a round trip is doubled: for this transfer at once, for the next ones."""
    bench.fetch(nbytes=16000, now=0.0)
    bench.answer(nbytes=16000, shape=[16000], now=1.0)
    assert sum(c.nbytes for c in sent(bench.chunk(0, 4096, now=1.5), XferCredit)) == 4096
    assert sum(c.nbytes for c in sent(bench.chunk(4096, 4096, now=1.9), XferCredit)) == 4096 + 8192
    bench.chunk(8192, 7808, now=2.0)
    bench.checked(bench.machine.release(ME, "a", 2.5))
    (req,) = sent(bench.fetch(key="b", now=3.0), XferReq)
    assert req.credit_bytes == 16384


def test_a_window_on_a_short_way_stays(bench: Bench) -> None:
    """More of it would wait in sockets, before whatever is asked for next."""
    bench.fetch(nbytes=16000, now=0.0)
    bench.answer(nbytes=16000, shape=[16000], now=0.1)
    bench.chunk(0, 4096, now=0.3)
    assert sum(c.nbytes for c in sent(bench.chunk(4096, 4096, now=0.4), XferCredit)) == 4096


def connected(effects: list[Effect]) -> list[int]:
    """Lanes that are being opened."""
    return [e.address.lane for e in effects if isinstance(e, Connect)]


def asked_on(effects: list[Effect]) -> list[int]:
    """Lanes that questions go to."""
    return [e.address.lane for e in effects if isinstance(e, SendToProducer)]


def test_small_ones_pass_a_large_one() -> None:
    """While bytes fill one connection, what is asked for next has another; then none is new."""
    bench = Bench(lanes=2, max_peers=3)
    assert connected(bench.fetch(nbytes=9000)) == [0]
    bench.checked(bench.machine.peer_up(THERE, 0.0))
    bench.answer(nbytes=9000, shape=[9000])
    effects = bench.fetch(key="b")
    assert (connected(effects), asked_on(effects)) == ([1], [1])
    bench.checked(bench.machine.peer_up(THERE._replace(lane=1), 0.0))
    effects = bench.fetch(key="c")
    assert (connected(effects), asked_on(effects)) == ([], [0])
    bench.fetch(key="d")
    bench.chunk(0, 9000)
    effects = bench.fetch(key="e")
    assert (connected(effects), asked_on(effects)) == ([], [0])


@pytest.mark.parametrize(
    ("options", "streams", "up"),
    [
        ({"lanes": 1}, True, True),
        ({"lanes": 2, "max_peers": 1}, True, True),
        ({"lanes": 2}, False, True),
        ({"lanes": 2}, True, False),
    ],
    ids=["one lane", "no more connections", "nothing through sockets", "not connected"],
)
def test_one_lane_is_enough(options: dict[str, Any], streams: bool, up: bool) -> None:
    """Where another would not be allowed, or be of no use."""
    bench = Bench(**options)
    bench.fetch(nbytes=9000)
    bench.checked(bench.machine.peer_up(THERE, 0.0))
    if streams:
        bench.answer(nbytes=9000, shape=[9000])
    else:
        bench.grant_memory(nbytes=9000, shape=[9000])
    if not up:
        bench.checked(bench.machine.peer_down(THERE, 0.0))
    effects = bench.fetch(key="b")
    assert (connected(effects), asked_on(effects)) == ([], [0])


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 0), (100, 4096), (0, 9001), (-1, 10), (2**62, 10)]
)
def test_chunks_that_have_no_place(bench: Bench, offset: int, nbytes: int) -> None:
    """Out of order, beyond the end or empty: not one byte is written."""
    bench.fetch(nbytes=9000)
    bench.answer(nbytes=9000, shape=[9000])
    assert bench.machine.landing(THERE, XferChunk("session", 1, offset, nbytes)) is None


def test_chunks_before_the_answer(bench: Bench) -> None:
    """They have no place, and change nothing."""
    bench.fetch()
    assert bench.machine.landing(THERE, XferChunk("session", 1, 0, 1000)) is None
    assert bench.chunk(0, 1000) == []
    assert told(bench.answer(payload=1000)) == [(ME, "zmq")]


def test_answers_to_an_older_attempt(bench: Bench) -> None:
    """They are ignored, but a grant that nobody wants is handed back, each one."""
    bench.fetch()
    bench.checked(bench.machine.peer_up(THERE, 0.0))
    bench.checked(bench.machine.peer_down(THERE, 0.1))
    bench.checked(bench.machine.peer_up(THERE, 0.2))
    (done,) = bench.answer(1, payload=1000)
    assert isinstance(done, SendToProducer)
    assert isinstance(done.message, XferDone)
    assert done.message.xfer_id == 1
    assert bench.answer(1, status=XferStatus.NACK_MISSING) == []
    current = bench.machine._fetches["a"].xfer_id
    assert told(bench.answer(current, payload=1000)) == [(ME, "zmq")]


def test_grants_of_another_session_are_not_handed_back(bench: Bench) -> None:
    """They are none of ours to end."""
    assert bench.answer(session_id="before", payload=1000) == []


def test_dropped_while_it_arrived(bench: Bench) -> None:
    """A reservation that was condemned meanwhile is not delivered."""
    bench.fetch()
    bench.pool.drop_all()
    effects = bench.answer(payload=1000)
    assert told(effects) == [(ME, "missing")]
    assert bench.empty()


def test_weights_changed(bench: Bench) -> None:
    """What is on its way is not wanted, and the producer hears of it."""
    bench.fetch()
    bench.fetch(key="b")
    bench.grant_memory()
    bench.pool.drop_all()
    effects = bench.checked(bench.machine.drop_all())
    assert sorted(told(effects)) == [(ME, "missing"), (ME, "missing")]
    assert len(sent(effects, XferDone)) == 2
    assert StopCopy(1) in effects
    assert bench.empty()


# ── the same-host plane ──────────────────────────────────────────────────────


def test_copy(bench: Bench) -> None:
    """The machine says what to copy; the end of the copy is the end of the fetch."""
    bench.fetch()
    (copy,) = bench.grant_memory()
    assert isinstance(copy, CopyFromPeer)
    assert (copy.region, copy.extents, copy.generation) == (REGION, ((0, 1),), 4)
    effects = bench.checked(bench.machine.copied(1, "", 0.0))
    assert told(effects) == [(ME, "memory")]
    assert len(sent(effects, XferDone)) == 1
    assert bench.machine.copied(1, "", 0.0) == []


def test_copy_failed(bench: Bench) -> None:
    """The grant goes back, and the item is asked for without that plane."""
    bench.fetch()
    bench.grant_memory()
    effects = bench.checked(bench.machine.copied(1, "torn", 0.0))
    (done,), (req,) = sent(effects, XferDone), sent(effects, XferReq)
    assert (done.xfer_id, req.xfer_id, req.planes) == (1, 2, ["zmq"])
    assert bench.machine.counts["memory_plane_refused"] == 1
    assert told(bench.answer(2, payload=1000)) == [(ME, "zmq")]


def test_bytes_from_elsewhere_do_not_end_a_fetch_that_is_copied(bench: Bench) -> None:
    """The copy would go on writing into blocks that are no longer this item's."""
    bench.fetch()
    bench.grant_memory()
    assert bench.machine.landing(THERE, XferChunk("session", 1, 0, 1000)) is None
    assert bench.chunk(0, 1000) == []
    assert told(bench.checked(bench.machine.copied(1, "", 0.0))) == [(ME, "memory")]


@pytest.mark.parametrize("ending", ["release", "deadline", "client_gone", "peer_down", "refused"])
def test_a_copy_is_stopped_with_its_fetch(bench: Bench, ending: str) -> None:
    """Before its room is somebody else's."""
    bench.fetch(seconds=5.0)
    bench.grant_memory()
    machine = bench.machine
    effects = bench.checked(
        {
            "release": lambda: machine.release(ME, "a", 1.0),
            "deadline": lambda: machine.tick(5.0),
            "client_gone": lambda: machine.client_gone(ME, 1.0),
            "peer_down": lambda: machine.peer_down(THERE, 1.0),
            "refused": lambda: machine.peer_refused(THERE, "no"),
        }[ending]()
    )
    assert StopCopy(1) in effects
    assert machine.copied(1, "", 1.0) == []


@pytest.mark.parametrize("fields", [{"region": None}, {}])
def test_memory_that_cannot_be_used(fields: dict[str, Any]) -> None:
    """Without a region, or where it was not asked for: no wait for what never comes."""
    bench = Bench(planes=("zmq",) if not fields else ("memory", "zmq"))
    bench.fetch()
    effects = bench.grant_memory(**fields)
    assert told(effects) == [(ME, "mismatch")]
    assert len(sent(effects, XferDone)) == 1
    assert bench.empty()


# ── clients and connections ──────────────────────────────────────────────────


def test_release_of_a_wait(bench: Bench) -> None:
    """The last one to give up ends the transfer, and the producer hears of it."""
    bench.fetch()
    bench.fetch(OTHER)
    assert bench.checked(bench.machine.release(ME, "a", 0.0)) == []
    effects = bench.checked(bench.machine.release(OTHER, "a", 0.0))
    assert len(sent(effects, XferDone)) == 1
    assert bench.empty()
    assert bench.machine.release(OTHER, "a", 0.0) == []
    assert bench.machine.release(b"never seen", "never seen", 0.0) == []


def test_client_gone(bench: Bench) -> None:
    """Its pins end and its waits, however many."""
    for number, key in enumerate("abc", start=1):
        bench.fetch(key=key)
        if key != "c":
            bench.answer(number, payload=1000, mm_hash=key)
    assert bench.pool.usage().pinned == 2
    bench.checked(bench.machine.client_gone(ME, 0.0))
    assert bench.empty()
    assert bench.machine.client_gone(ME, 0.0) == []


def test_connection_lost(bench: Bench) -> None:
    """The transfer begins anew with the next connection, under a new number."""
    bench.fetch(nbytes=9000)
    bench.checked(bench.machine.peer_up(THERE, 0.0))
    bench.answer(nbytes=9000, shape=[9000])
    bench.chunk(0, 4096)
    assert sent(bench.checked(bench.machine.peer_down(THERE, 1.0)), XferReq) == []
    assert bench.machine.peer_down(THERE, 1.1) == []
    (req,) = sent(bench.checked(bench.machine.peer_up(THERE, 2.0)), XferReq)
    assert bench.machine.landing(THERE, XferChunk("session", 1, 4096, 4096)) is None
    bench.answer(req.xfer_id, nbytes=9000, shape=[9000])
    assert told(bench.chunk(0, 9000, req.xfer_id)) == [(ME, "zmq")]


def test_lost_while_it_was_to_be_asked_again(bench: Bench) -> None:
    """The pause goes on; the question is asked once."""
    bench.fetch()
    bench.checked(bench.machine.peer_up(THERE, 0.0))
    bench.answer(status=XferStatus.NACK_NOT_READY)
    bench.checked(bench.machine.peer_down(THERE, 0.01))
    assert sent(bench.checked(bench.machine.peer_up(THERE, 0.02)), XferReq) == []
    assert len(sent(bench.tick(FIRST_BACKOFF), XferReq)) == 1
    assert bench.tick(FIRST_BACKOFF) == []


def test_away_for_too_long(bench: Bench) -> None:
    """All who use that peer are told, the others not; in the end it is forgotten."""
    bench.fetch()
    bench.fetch(key="b", peer_host=ELSEWHERE.host, peer_port=ELSEWHERE.port, seconds=999.0)
    bench.checked(bench.machine.peer_up(ELSEWHERE, 0.0))
    assert told(bench.tick(2.0)) == [(ME, "peer_unreachable")]
    assert bench.machine.gauges()["fetching"] == 1
    assert Disconnect(THERE) in bench.tick(PEER_IDLE_SECONDS)
    bench.machine.release(ME, "b", 3.0)
    assert Disconnect(ELSEWHERE) in bench.tick(10 * PEER_IDLE_SECONDS)
    assert bench.machine.deadline() is None


def test_address_refused(bench: Bench) -> None:
    """At once, in words, and the place in the table is free for another peer."""
    bench.fetch()
    effects = bench.checked(bench.machine.peer_refused(THERE, "it is 169.254.169.254"))
    assert told(effects) == [(ME, "peer_refused")]
    assert "169.254" in words([e for e in effects if isinstance(e, Tell)])
    assert Disconnect(THERE) in effects
    assert bench.machine.gauges()["peers"] == 0
    assert bench.machine.peer_refused(THERE, "again") == []


def test_news_of_unknown_peers(bench: Bench) -> None:
    """A connection that was given up may still be heard of."""
    assert bench.machine.peer_up(THERE, 0.0) == []
    assert bench.machine.peer_down(THERE, 0.0) == []
    assert bench.machine.deadline() is None


def test_room_is_given_in_order(bench: Bench) -> None:
    """A small item does not overtake a large one for ever."""
    filler = bench.reserve("filler", BLOCKS * BLOCK)
    bench.fetch(key="large", nbytes=BLOCKS * BLOCK)
    bench.fetch(key="small", nbytes=1)
    bench.pool.abandon("filler", filler)
    (req,) = sent(bench.checked(bench.machine.room(0.0)), XferReq)
    assert req.mm_hash == "large"
    assert bench.machine.gauges()["waiting_for_room"] == 1


def test_a_wait_for_room_has_its_deadline(bench: Bench) -> None:
    """And its own label."""
    bench.reserve("filler", BLOCKS * BLOCK)
    bench.fetch(seconds=1.0)
    effects = bench.tick(1.0)
    assert told(effects) == [(ME, "pool_full")]
    assert sent(effects, XferDone) == []
    assert bench.machine.gauges()["waiting_for_room"] == 0
