# SPDX-License-Identifier: Apache-2.0
"""Random walks of a producer and a consumer over a network that loses, repeats and reorders.

After every step both pools and both machines are valid. What is delivered is what was
saved under that key at some time, byte for byte. Every fetch ends once, by its deadline. When
all is over, capacity is back to 100 % and no table holds anything.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import event, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ec_connector.protocol.connections import PEER_IDLE_SECONDS
from ec_connector.protocol.local import Ready
from ec_connector.testing import Pair

BLOCKS, BLOCK = 12, 256
KEYS = st.sampled_from("abcde")
CLIENTS = st.sampled_from([b"one", b"two", b"three"])
SIZES = {"a": 10, "b": 256, "c": 1000, "d": 2000, "e": 3000}
TIMEOUT = 3.0


class NetworkWalk(RuleBasedStateMachine):
    """One item size a key, so that content is the only thing that changes."""

    @initialize(memory=st.booleans(), chunk=st.sampled_from([4096, 16384]))
    def start(self, memory: bool, chunk: int) -> None:
        self.pair = Pair(
            blocks=BLOCKS,
            block_bytes=BLOCK,
            planes=("memory", "zmq") if memory else ("zmq",),
            chunk_bytes=chunk,
            window_bytes=2 * chunk,
            max_parked=4,
            lease=2.0,
        )
        self.saved: dict[str, set[bytes]] = {key: set() for key in SIZES}
        self.open: dict[tuple[bytes, str], float] = {}
        self.held: set[tuple[bytes, str]] = set()
        self.seen = 0
        self.version = 0

    def content(self, key: str) -> bytes:
        self.version += 1
        return (f"{key}{self.version}/".encode() * SIZES[key])[: SIZES[key]]

    # ── engines ──────────────────────────────────────────────────────────────

    @rule(key=KEYS, replace=st.booleans())
    def reserve(self, key: str, replace: bool) -> None:
        self.pair.reserve(key, SIZES[key], step=self.version, replace=replace)

    @rule(key=KEYS)
    def save(self, key: str) -> None:
        data = self.content(key)
        self.saved[key].add(data)
        try:
            self.pair.save(key, data)
        except ValueError:
            event("no room to save")

    @rule(key=KEYS)
    def fail(self, key: str) -> None:
        try:
            self.pair.fail(key, "broken")
        except KeyError:
            return
        event("save failed")

    @rule()
    def step_over(self) -> None:
        self.pair.step_done(self.version)

    @rule(key=KEYS, client=CLIENTS)
    def fetch(self, key: str, client: bytes) -> None:
        if (client, key) in self.open or (client, key) in self.held:
            return
        self.open[client, key] = self.pair.clock.now + TIMEOUT
        self.pair.fetch(key, SIZES[key], client, timeout=TIMEOUT)
        self.read_answers()

    @rule(key=KEYS, client=CLIENTS, before=st.booleans())
    def save_and_fetch(self, key: str, client: bytes, before: bool) -> None:
        if before:
            self.save(key)
            self.fetch(key, client)
        else:
            self.reserve(key, replace=True)
            self.fetch(key, client)
            self.deliver()
            self.save(key)

    @rule(key=KEYS, client=CLIENTS)
    def release(self, key: str, client: bytes) -> None:
        self.open.pop((client, key), None)
        self.held.discard((client, key))
        self.pair.release(key, client)

    @rule(client=CLIENTS)
    def client_ends(self, client: bytes) -> None:
        self.open = {one: when for one, when in self.open.items() if one[0] != client}
        self.held = {one for one in self.held if one[0] != client}
        self.pair._do(self.pair.consumer.client_gone(client, self.pair.clock.now))

    # ── the network ──────────────────────────────────────────────────────────

    @rule()
    def deliver(self) -> None:
        self.pair.run()

    @rule()
    def deliver_one(self) -> None:
        self.pair._turn()

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.7, 2.1, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.pair.advance(seconds)

    @precondition(lambda self: len(self.pair.transport.to_consumer) > 0)
    @rule(what=st.sampled_from(["drop", "duplicate", "reorder"]), pick=st.integers(0, 20))
    def meddle_with_answers(self, what: str, pick: int) -> None:
        self.meddle(self.pair.transport.to_consumer, what, pick)

    @precondition(lambda self: len(self.pair.transport.to_producer) > 0)
    @rule(what=st.sampled_from(["drop", "duplicate", "reorder"]), pick=st.integers(0, 20))
    def meddle_with_requests(self, what: str, pick: int) -> None:
        self.meddle(self.pair.transport.to_producer, what, pick)

    def meddle(self, channel, what: str, pick: int) -> None:  # type: ignore[no-untyped-def]
        position = pick % len(channel)
        event(what)
        if what == "drop":
            channel.drop(position)
        elif what == "duplicate":
            channel.duplicate(position)
        else:
            channel.reorder(position)

    @rule(delay=st.sampled_from([0.0, 0.05, 1.5]))
    def slow_down(self, delay: float) -> None:
        self.pair.transport.to_consumer.delay = delay

    @rule(hold=st.booleans())
    def hold_copies(self, hold: bool) -> None:
        self.pair.hold_copies = hold

    @rule(cut=st.booleans())
    def partition(self, cut: bool) -> None:
        if cut:
            self.pair.partition()
        else:
            self.pair.heal()

    # ── what must hold ───────────────────────────────────────────────────────

    def read_answers(self) -> None:
        answers = self.pair.answers[self.seen :]
        self.seen = len(self.pair.answers)
        for client, message in answers:
            key = message.key
            assert (client, key) in self.open, f"{message} was not asked for"
            del self.open[client, key]
            if isinstance(message, Ready):
                self.held.add((client, key))
                event(f"delivered by {message.plane}")
                assert self.pair.bytes_of(message) in self.saved[key]
            else:
                event(f"failed: {message.reason}")

    @invariant()
    def nothing_is_wrong(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.read_answers()
        self.pair.validate()
        late = [one for one, when in self.open.items() if self.pair.clock.now > when + 1e-6]
        assert not late

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        pair.hold_copies = False
        pair.transport.to_consumer.delay = 0.0
        pair.heal()
        pair.step_done(self.version)
        for client, key in sorted(self.held | set(self.open)):
            pair.release(key, client)
        pair.advance(3 * PEER_IDLE_SECONDS)
        pair.validate()
        for pool in (pair.producer_pool, pair.consumer_pool):
            usage = pool.usage()
            assert (usage.pinned, usage.saving) == (0, 0)
        assert pair.producer.gauges() == {"grants": 0, "parked_now": 0}
        assert pair.consumer.gauges() == {"fetching": 0, "waiting_for_room": 0, "peers": 0}


NetworkWalk.TestCase.settings = settings(
    parent=settings(), max_examples=150, stateful_step_count=100
)
TestNetwork = NetworkWalk.TestCase
