# SPDX-License-Identifier: Apache-2.0
"""Fetching ahead: what a hint may do, and that it costs no engine anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ec_connector.errors import MismatchError
from ec_connector.protocol.ahead import BURST, LINES_A_SECOND, MOST, SHARE, Ahead, Lines, Pace
from ec_connector.protocol.fetch import AHEAD
from ec_connector.protocol.hint import MAX_LINE_BYTES, OUTCOMES, hint_lines, read_hint
from ec_connector.protocol.local import FetchItem, Reserve, ReserveItem
from ec_connector.protocol.tickets import Tickets
from ec_connector.testing import Pair
from ec_connector.testing.wiring import PRODUCER

BLOCK = 1024
BLOCKS = 64
PART = BLOCKS // SHARE
"""Blocks that may be fetched ahead at one time."""


def entry(nbytes: int, **changes: Any) -> dict[str, Any]:
    """An announcement of so many bytes at the producer."""
    words = {"peer_host": PRODUCER.host, "peer_port": PRODUCER.port, "dtype": "uint8"}
    return {**words, "size_bytes": nbytes, "shape": [nbytes], **changes}


def rows(nbytes: int, seed: int = 1) -> bytes:
    """Bytes of an item."""
    return bytes((i * 31 + seed) % 256 for i in range(nbytes))


class Bench:
    """A pair, and what the consumer's agent fetches ahead."""

    def __init__(self, **options: Any) -> None:
        self.pair = Pair(**{"blocks": BLOCKS, "block_bytes": BLOCK, **options})
        self.ahead = Ahead(self.pair.consumer_pool, self.pair.consumer, 5.0)
        self._seen = 0
        # The producer is known by a name, and connected.
        self.pair.fetch("none", 1)
        self.pair.run()

    def hint(self, key: str, nbytes: int, **changes: Any) -> None:
        for line in hint_lines({key: entry(nbytes, **changes)}):
            self.line(line.rstrip())

    def line(self, line: bytes) -> None:
        self.pair._do(self.ahead.hint(line, self.pair.clock.now))
        self.listen()

    def listen(self) -> None:
        """As the agent's loop: what the machine says to this client goes there."""
        while self._seen < len(self.pair.answers):
            client, message = self.pair.answers[self._seen]
            self._seen += 1
            if client == AHEAD:
                self.pair._do(self.ahead.told(message, self.pair.clock.now))

    def run(self) -> None:
        self.pair._do(self.ahead.make_way(self.pair.clock.now))
        self.pair.run()
        self.listen()
        self.pair.validate()

    def outcomes(self) -> dict[str, int]:
        """Those that came about, by name."""
        found = {name: self.ahead.counts[f"ahead_{name}"] for name in OUTCOMES}
        return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("planes", [("zmq",), ("memory", "zmq")])
def test_in_the_pool_before_anybody_asks(planes: tuple[str, ...]) -> None:
    """Unpinned; a fetch finds it there."""
    bench = Bench(planes=planes)
    bench.pair.save("a", rows(5000))
    bench.hint("a", 5000)
    bench.run()
    usage = bench.pair.consumer_pool.usage()
    assert (usage.entries, usage.pinned, usage.saving) == (1, 0, 0)
    bench.pair.fetch("a", 5000)
    ready = bench.pair.ready("a")
    assert ready.plane == "pool"
    assert bench.pair.bytes_of(ready) == rows(5000)
    bench.hint("a", 5000)
    assert bench.outcomes() == {"fetched": 1, "here": 1}


def test_an_engine_joins_what_is_on_its_way() -> None:
    """One transfer for both, and each its own deadline."""
    bench = Bench()
    bench.pair.reserve("a", 5000)
    bench.hint("a", 5000)
    bench.run()
    bench.pair.fetch("a", 5000, timeout=20.0)
    bench.pair.advance(6.0)
    bench.run()
    assert bench.outcomes() == {"failed": 1}
    bench.pair.save("a", rows(5000))
    bench.pair.advance(2.0)
    assert bench.pair.bytes_of(bench.pair.ready("a")) == rows(5000)


@pytest.mark.parametrize(
    "lie", [{"shape": [50, 100]}, {"peer_host": "10.0.0.1"}, {"size_bytes": 400}]
)
def test_a_hint_that_says_otherwise_makes_way(lie: dict[str, Any]) -> None:
    """The engine's announcement counts: its fetch neither fails nor waits for the other."""
    bench = Bench()
    bench.pair.save("a", rows(5000))
    bench.hint("a", 5000, **lie)
    bench.pair.fetch("a", 5000)
    bench.listen()
    bench.run()
    assert bench.pair.bytes_of(bench.pair.ready("a")) == rows(5000)
    assert bench.outcomes() == {"failed": 1}


def test_an_engine_that_asks_its_own_pool_does_not_wait() -> None:
    """Without an announcement the item is not here, whatever is on its way."""
    bench = Bench()
    bench.pair.reserve("a", 5000)
    bench.hint("a", 5000)
    bench.pair._do(bench.pair.consumer.fetch(b"engine", FetchItem("a", 5000), 0.0))
    assert bench.pair.failed("a", b"engine").reason == "missing"


def test_it_replaces_nothing() -> None:
    """Other content of the same key stays, also while the engine saves it."""
    bench = Bench()
    bench.pair.save("a", rows(5000))
    bench.pair.fetch("a", 5000)
    bench.run()
    bench.pair.release("a")
    bench.hint("a", 400, shape=[400])
    pool = bench.pair.consumer_pool
    pool.reserve("b", 10, "uint8", (10,), owner=b"own", step=0, now=0.0)
    bench.hint("b", 20)
    bench.run()
    held = pool.get("a")
    assert held is not None
    assert held.nbytes == 5000
    assert bench.outcomes() == {"here": 2}


def test_bounded_in_number_and_room() -> None:
    """No more than a part of the pool, no more than so many; the others are dropped."""
    bench = Bench()
    bench.hint("large", (PART + 1) * BLOCK)
    for number in range(PART + 3):
        bench.hint(f"{number}", BLOCK)
    assert bench.ahead.gauges() == {"fetching_ahead": PART}
    assert bench.outcomes() == {"no_room": 4}
    wide = Bench(blocks=(MOST + 1) * SHARE)
    for number in range(MOST + 3):
        wide.hint(f"{number}", 1)
    assert wide.ahead.gauges() == {"fetching_ahead": MOST}
    assert wide.outcomes() == {"no_room": 3}


def test_room_that_is_pinned_is_none() -> None:
    """Nothing waits for room ahead of an engine."""
    bench = Bench()
    bench.pair.save("all", rows(BLOCKS * BLOCK))
    bench.pair.fetch("all", BLOCKS * BLOCK)
    bench.run()
    bench.hint("a", 1)
    assert bench.outcomes() == {"no_room": 1}
    assert bench.pair.consumer.gauges()["waiting_for_room"] == 0


def test_makes_way_for_an_engines_fetch() -> None:
    """What nobody asked for gives its blocks to what somebody did, at once."""
    bench = Bench()
    bench.hint("a", PART * BLOCK)
    bench.pair.save("all", rows(BLOCKS * BLOCK))
    bench.pair.fetch("all", BLOCKS * BLOCK)
    bench.run()
    assert bench.pair.bytes_of(bench.pair.ready("all")) == rows(BLOCKS * BLOCK)
    assert bench.outcomes() == {"made_way": 1}


@pytest.mark.parametrize(("key", "nbytes"), [("b", BLOCKS * BLOCK), ("a", 10)])
def test_makes_way_for_an_engines_save(key: str, nbytes: int) -> None:
    """For its room, and for the same item: that an engine saves is surer than what may come."""
    bench = Bench()
    bench.pair.reserve("a", 5000)
    bench.hint("a", 5000)
    reserve = Reserve(1, 1, [ReserveItem(key, nbytes, "uint8", [nbytes])])
    bench.pair._do(bench.ahead.make_way_for(reserve, 0.0))
    assert bench.pair.consumer_pool.usage().free == BLOCKS
    assert bench.outcomes() == {"made_way": 1}
    bench.run()


def test_a_save_beside_it_costs_it_nothing() -> None:
    """There is room for both."""
    bench = Bench()
    bench.pair.reserve("a", 5000)
    bench.hint("a", 5000)
    reserve = Reserve(1, 1, [ReserveItem("b", 10, "uint8", [10])])
    assert bench.ahead.make_way_for(reserve, 0.0) == []
    assert bench.ahead.gauges() == {"fetching_ahead": 1}


def test_strangers() -> None:
    """No name is looked up, and the last connections are for engines."""
    bench = Bench()
    bench.hint("a", 1, peer_host="encoder-0.svc")
    bench.pair.consumer._peers.max_peers = 4
    for last in range(1, 5):
        bench.hint(f"{last}", 1, peer_host=f"10.0.0.{last}")
    assert bench.pair.consumer.gauges()["peers"] == 2
    assert bench.outcomes() == {"stranger": 4}


def test_weights_that_change() -> None:
    """What is on its way is of before."""
    bench = Bench()
    bench.pair.reserve("a", 5000)
    bench.hint("a", 5000)
    bench.pair.consumer_pool.drop_all()
    bench.pair._do(bench.pair.consumer.drop_all())
    bench.listen()
    assert bench.outcomes() == {"failed": 1}
    assert bench.ahead.gauges() == {"fetching_ahead": 0}


def test_tickets_are_asked_for() -> None:
    """As of an engine's request."""
    bench = Bench()
    bench.pair.consumer._tickets = Tickets([bytes(32)])
    bench.hint("a", 1, ticket="0" * 64, peer_host="10.0.0.1")
    assert bench.outcomes() == {"failed": 1}
    assert bench.pair.consumer.gauges()["peers"] == 1


@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b"[]",
        b"\xff",
        b"{}",
        b"[" * MAX_LINE_BYTES,
        b" " * (MAX_LINE_BYTES + 1),
        json.dumps({"key": 1, **entry(1)}).encode(),
        json.dumps({"key": "a" * 513, **entry(1)}).encode(),
        json.dumps({"key": "a", **entry(1, peer_host=7)}).encode(),
        json.dumps({"key": "a", **entry(1, peer_host="")}).encode(),
        json.dumps({"key": "a", **entry(1, peer_port=0)}).encode(),
        json.dumps({"key": "a", **entry(-1)}).encode(),
        json.dumps({"key": "a", **entry(1, shape=[1] * 9)}).encode(),
        json.dumps({"key": "a", **entry(1, dtype="\ud800")}).encode(),
        json.dumps({"key": "a", **entry(1, ticket="0" * 65)}).encode(),
    ],
)
def test_what_is_no_hint(line: bytes) -> None:
    """Counted, and nothing else happens."""
    bench = Bench()
    bench.line(line)
    assert bench.outcomes() == {"malformed": 1}
    assert bench.pair.consumer.counts["fetches"] == 1  # its own


def test_only_what_can_be_fetched_is_hinted() -> None:
    """What is not announced with an address, or could not be written in a line, is left out."""
    good = entry(1, metadata={"image_grid_thw": [1, 2, 2]}, item_indices=[0], modality="image")
    params = {
        "a": good,
        "none": entry(1, peer_host=""),
        "text": "x",
        "half": entry(1, ticket="\ud800"),
        "long": entry(1, ticket="0" * MAX_LINE_BYTES),
    }
    (line,) = hint_lines(params)
    assert json.loads(line) == {"key": "a", **entry(1)}
    assert line.endswith(b"\n")


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_lines_of_a_stream(step: int) -> None:
    """However it is cut; of a line without end only so much is kept."""
    lines = Lines()
    text = b"\na\n\nbc\n" + b"x" * (3 * MAX_LINE_BYTES) + b"\nlast\nrest"
    found = [one for at in range(0, len(text), step) for one in lines.feed(text[at : at + step])]
    assert found == [b"a", b"bc", b"x" * (MAX_LINE_BYTES + 1), b"last"]


def test_pace() -> None:
    """A burst is free; what comes on top of it has its time."""
    pace = Pace(0.0)
    assert pace.pause(BURST, 0.0) == 0.0
    assert pace.pause(100, 0.0) == pytest.approx(100 / LINES_A_SECOND)
    assert pace.pause(0, 100 / LINES_A_SECOND) == 0.0
    assert pace.pause(BURST, 1000.0) == 0.0
    assert pace.pause(1, 1000.0) == pytest.approx(1 / LINES_A_SECOND)


def test_keys_as_deep_as_they_can_be_read() -> None:
    """Reading them may just work, and then nothing goes deeper."""
    for depth in range(400, 1100):
        line = b'{"key":' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(MismatchError):
            read_hint(line, 1.0)
