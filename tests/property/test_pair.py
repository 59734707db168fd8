# SPDX-License-Identifier: Apache-2.0
"""Random walks of a producer and a consumer over a network that loses, repeats and reorders.

After every step both pools and both machines are valid. What is delivered is what was
saved under that key at some time, byte for byte, and stays so until it is released. Every fetch
ends once, by its deadline. No table grows beyond what is open. When all is over, capacity is
back to 100 % and no table holds anything.

``HYPOTHESIS_PROFILE=search`` walks longer, and elsewhere each time.
"""

from __future__ import annotations

import importlib.util
import random

import hypothesis.strategies as st
from hypothesis import event, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ec_connector.errors import PoolError
from ec_connector.protocol.account import PACKING
from ec_connector.protocol.ahead import Ahead
from ec_connector.protocol.connections import PEER_IDLE_SECONDS
from ec_connector.protocol.fetch import AHEAD
from ec_connector.protocol.hint import hint_lines
from ec_connector.protocol.local import Ready
from ec_connector.testing import Pair
from ec_connector.testing.wiring import PRODUCER

HAVE_ZSTD = importlib.util.find_spec("zstandard") is not None
BLOCKS, BLOCK = 12, 1024
KEYS = st.sampled_from("abcde")
CLIENTS = st.sampled_from([b"one", b"two", b"three"])
# In one message, in two chunks, and in three of which the last has to wait for credit.
SIZES = {"a": 10, "b": BLOCK, "c": 3000, "d": 5000, "e": 9500}
CHUNK = 4096
TIMEOUT = 3.0
MAX_PARKED = 4


class NetworkWalk(RuleBasedStateMachine):
    """One item size a key, so that content is the only thing that changes."""

    @initialize(memory=st.booleans(), packed=st.booleans())
    def start(self, memory: bool, packed: bool) -> None:
        codecs = ("zstd", "none") if packed and HAVE_ZSTD else ("none",)
        self.pair = Pair(
            blocks=BLOCKS,
            block_bytes=BLOCK,
            planes=("memory", "zmq") if memory else ("zmq",),
            chunk_bytes=CHUNK,
            window_bytes=2 * CHUNK,
            max_parked=MAX_PARKED,
            lease=2.0,
            producer_codecs=codecs,
            consumer_codecs=codecs,
        )
        self.packed = packed
        self.saved: dict[str, set[bytes]] = {key: set() for key in SIZES}
        self.open: dict[tuple[bytes, str], float] = {}
        self.held: dict[tuple[bytes, str], Ready] = {}
        self.own: dict[str, list[int]] = {key: [] for key in SIZES}
        self.ahead = Ahead(self.pair.consumer_pool, self.pair.consumer, TIMEOUT)
        self.seen = 0
        self.version = 0

    def content(self, key: str) -> bytes:
        self.version += 1
        # No two places alike, so that bytes in a wrong one are seen.
        content = random.Random(self.version).randbytes(SIZES[key])
        # Of 16 kinds of bytes a codec makes half as many; items of an odd version stay as they are.
        return bytes(b & 15 for b in content) if self.packed and self.version % 2 == 0 else content

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

    @rule(key=KEYS, lie=st.integers(0, 3))
    def hint(self, key: str, lie: int) -> None:
        """A router names an item, now and then of another size than it has."""
        nbytes = SIZES[key] + (lie == 0)
        where = {"peer_host": PRODUCER.host, "peer_port": PRODUCER.port, "dtype": "uint8"}
        entry = {**where, "size_bytes": nbytes, "shape": [nbytes]}
        (line,) = hint_lines({key: entry})
        self.pair._do(self.ahead.hint(line, self.pair.clock.now))
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
        self.held.pop((client, key), None)
        self.pair.release(key, client)

    @rule(key=KEYS, client=CLIENTS)
    def loaded(self, key: str, client: bytes) -> None:
        self.pair.loaded(key, client)

    @rule(client=CLIENTS)
    def client_ends(self, client: bytes) -> None:
        self.open = {one: when for one, when in self.open.items() if one[0] != client}
        self.held = {one: ready for one, ready in self.held.items() if one[0] != client}
        self.pair._do(self.pair.consumer.client_gone(client, self.pair.clock.now))

    @rule(key=KEYS)
    def consumer_reserves(self, key: str) -> None:
        """The consumer's own engine comes to encode an item."""
        pool, nbytes = self.pair.consumer_pool, SIZES[key]
        if pool.get(key) is not None:
            return
        try:
            entry = pool.reserve(
                key, nbytes, "uint8", (nbytes,), owner=b"own", step=0, now=self.pair.clock.now
            )
        except PoolError:
            return
        self.own[key].append(entry.generation)

    @rule(key=KEYS, well=st.booleans())
    def consumer_saves(self, key: str, well: bool) -> None:
        if not self.own[key]:
            return
        pool, generation = self.pair.consumer_pool, self.own[key].pop()
        entry = pool.get(key)
        current = entry is not None and entry.generation == generation
        if well and current:
            data = self.content(key)
            self.saved[key].add(data)
            self.pair._here.write(entry.extents, data)
            pool.commit(key, generation, self.pair.clock.now)
            self.pair._do(self.pair.consumer.saved(key, self.pair.clock.now))
            event("saved at the consumer")
        elif pool.abandon(key, generation) and current:
            self.pair._do(self.pair.consumer.lost(key))

    @rule(here=st.booleans())
    def weights_change(self, here: bool) -> None:
        if here:
            self.pair.consumer_pool.drop_all()
            self.pair._do(self.pair.consumer.drop_all())
        else:
            self.pair.producer_pool.drop_all()
            self.pair._do(self.pair.producer.drop_all())

    # ── the network ──────────────────────────────────────────────────────────

    @rule()
    def deliver(self) -> None:
        self.pair.run()

    @rule()
    def all_is_well(self) -> None:
        """Nothing is cut, held or slow, and all that is on its way arrives."""
        self.pair.hold_copies = False
        self.pair.transport.to_consumer.delay = 0.0
        self.pair.heal()
        self.pair.run()

    @rule()
    def deliver_one(self) -> None:
        self.pair._turn()

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.7, 2.1, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.pair.advance(seconds)

    @rule(seconds=st.sampled_from([0.2, 2.5, 90.0, 1e6]))
    def clock_jumps(self, seconds: float) -> None:
        """The host slept: all that was due meanwhile is due at once."""
        self.pair.clock.advance(seconds)
        self.pair._tick()

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
        """Copies out of shared memory, and unpacking."""
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
            if client == AHEAD:
                self.pair._do(self.ahead.told(message, self.pair.clock.now))
                event(f"ahead: {type(message).__name__}")
                continue
            assert (client, key) in self.open, f"{message} was not asked for"
            del self.open[client, key]
            if isinstance(message, Ready):
                self.held[client, key] = message
                event(f"delivered by {message.plane}, {key}")
            else:
                event(f"failed: {message.reason}")

    @invariant()
    def nothing_is_wrong(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.read_answers()
        self.pair._do(self.ahead.make_way(self.pair.clock.now))
        self.pair.validate()
        for (_, key), ready in self.held.items():
            assert self.pair.bytes_of(ready) in self.saved[key]
        parked, fetching = self.pair.producer.gauges(), self.pair.consumer.gauges()
        assert parked["parked_now"] <= MAX_PARKED
        assert parked["grants"] <= len(SIZES)
        ahead = self.ahead.gauges()["fetching_ahead"]
        assert fetching["fetching"] <= len({key for _, key in self.open}) + ahead
        assert fetching["waiting_for_room"] <= fetching["fetching"]
        assert fetching["peers"] <= 1
        for account in (*self.pair.served, *self.pair.fetched):
            beside = account.seconds.get(PACKING, 0.0)
            assert abs(sum(account.seconds.values()) - beside - account.total) < 1e-6
        late = [one for one, when in self.open.items() if self.pair.clock.now > when + 1e-6]
        assert not late

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        self.all_is_well()
        pair.step_done(self.version)
        for key, generations in self.own.items():
            for generation in generations:
                pair.consumer_pool.abandon(key, generation)
            pair._do(pair.consumer.lost(key))
        for client, key in sorted(self.held.keys() | self.open.keys()):
            pair.release(key, client)
        pair.advance(3 * PEER_IDLE_SECONDS)
        self.read_answers()
        assert self.ahead.gauges() == {"fetching_ahead": 0}
        pair.validate()
        for pool in (pair.producer_pool, pair.consumer_pool):
            usage = pool.usage()
            assert (usage.pinned, usage.saving) == (0, 0)
        assert pair.producer.gauges() == {"grants": 0, "parked_now": 0}
        assert pair.consumer.gauges() == {"fetching": 0, "waiting_for_room": 0, "peers": 0}
        assert len(pair.served) == pair.producer.counts["grants_made"]
        accounts = [*pair.served, *pair.fetched]
        assert len(accounts) == len({id(account) for account in accounts})
        assert all(account.outcome for account in accounts)


NetworkWalk.TestCase.settings = settings(
    max_examples=max(80, settings().max_examples), stateful_step_count=100
)
TestNetwork = NetworkWalk.TestCase
