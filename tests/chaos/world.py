# SPDX-License-Identifier: Apache-2.0
"""Two engines with their agents, a network between them, and what must hold after any fault."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from ec_connector.bench.children import Child
from tests.chaos.relay import Relay

MIB = 1024 * 1024
LEASE = 2.0
CONNECT = 1.0
DEADLINE = 10.0
"""Seconds a fetch may take that is to succeed; ends of others come much sooner."""
SOON = 3.0
"""Seconds a fetch may take that cannot succeed."""
GRACE = 2.0
"""Seconds later than that in which a busy machine may notice."""
PATIENCE = 20.0
SETTINGS = {
    "pool_size": 16 * MIB,
    "lease": LEASE,
    "connect_timeout": CONNECT,
    "planes": ["zmq"],
    "lanes": 1,
}
LANDED: dict[str, int] = {}
"""Faults injected and how requests ended, for the summary of the run."""


def note(what: str) -> None:
    """Count something for the summary."""
    LANDED[what] = LANDED.get(what, 0) + 1


class Side:
    """An engine's process and its agent. ``prefix``: a command that runs it somewhere else."""

    def __init__(self, name: str, prefix: Sequence[str] = (), **settings: Any) -> None:
        self.name = name
        self._prefix = prefix
        self._settings = {**SETTINGS, **settings}
        self._start()

    def _start(self) -> None:
        words = [json.dumps(self._settings)]
        self.child = Child("tests.chaos.engine", words, prefix=self._prefix)
        facts = self.ask("facts")
        self.agent: int = facts["agent"]
        self.port: int = facts["port"]

    def ask(self, command: str, *arguments: Any, timeout: float = PATIENCE) -> Any:
        """Have the engine do something; its answer."""
        return self.child.ask([command, *arguments], timeout)

    def put(self, key: str, nbytes: int) -> dict[str, Any]:
        """Save an item; its announcement."""
        announced: dict[str, Any] = self.ask("reserve", [key], nbytes)[0]
        assert "refused" not in announced, announced
        assert self.ask("save", [key], nbytes)
        return announced

    def stats(self) -> dict[str, Any]:
        """Its agent's counts; empty while there is none."""
        found: dict[str, Any] = self.ask("stats")
        return found

    def pid_of(self, whom: str) -> int:
        """The ``"agent"`` or its ``"owner"``."""
        return self.agent if whom == "agent" else self.child.pid

    def restart(self) -> None:
        """Another process in its place, as a supervisor starts it."""
        self.child.close()
        self._start()

    def close(self) -> None:
        """End it."""
        self.child.close()


class World:
    """A producer, a consumer, and the relay between them.

    Args:
        sides: the two, where they are not simply two of this host.
        settings: of both, where they are.
    """

    def __init__(self, sides: tuple[Side, Side] | None = None, **settings: Any) -> None:
        if sides is None:
            sides = Side("producer", **settings), Side("consumer", **settings)
        self.producer, self.consumer = sides
        self.relay = Relay("127.0.0.1", self.producer.port)
        self.stalled: Callable[[float, float], float] = lambda _begun, _ended: 0.0
        """Seconds between two times in which the machine itself stood still, where it is known."""
        self._asked: list[str] = []
        self._made = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.relay.close()
        self.consumer.close()
        self.producer.close()

    # ── requests ─────────────────────────────────────────────────────────────

    def through_relay(self, announced: dict[str, Any]) -> dict[str, Any]:
        """The announcement with the relay's address, if the producer is on this host."""
        if announced["peer_host"] != "127.0.0.1":
            return announced
        return {**announced, "peer_host": "127.0.0.1", "peer_port": self.relay.port}

    def item(self, nbytes: int = MIB) -> dict[str, Any]:
        """A new item at the producer."""
        self._made += 1
        return self.through_relay(self.producer.put(f"item-{self._made}", nbytes))

    def fetch(self, item: dict[str, Any], seconds: float = DEADLINE) -> str:
        """The consumer asks for it; returns its key."""
        self.consumer.ask("fetch", item, seconds)
        self._asked.append(item["key"])
        return str(item["key"])

    def fetch_part(self, item: dict[str, Any], nbytes: int, seconds: float = DEADLINE) -> str:
        """The same, and so many of its bytes have arrived."""
        before = self.consumer.stats().get("bytes_received", 0)
        key = self.fetch(item, seconds)
        eventually(
            lambda: self.consumer.stats().get("bytes_received", 0) >= before + nbytes,
            "no bytes come",
        )
        return key

    def ended(self, key: str, seconds: float = DEADLINE + GRACE) -> dict[str, Any]:
        """How a fetch ended, which it must have within its deadline."""
        ends = self.consumer.ask("ended", [key], seconds, timeout=seconds + PATIENCE)
        assert key in ends, f"{key} has not ended after {seconds} s"
        end: dict[str, Any] = ends[key]
        assert end["end"] in ("ready", "failed", "agent lost"), end
        note(f"ended: {end['end']}" + (f" ({end['reason']})" if "reason" in end else ""))
        return end

    def transfer(self, nbytes: int = MIB, seconds: float = DEADLINE) -> dict[str, Any]:
        """One item from side to side, let go of again; how it ended."""
        key = self.fetch(self.item(nbytes), seconds)
        end = self.ended(key, seconds + GRACE)
        self.consumer.ask("release", [key])
        return end

    # ── faults ───────────────────────────────────────────────────────────────

    def strike(self, side: str, whom: str, number: signal.Signals) -> None:
        """Send a signal to a side's agent or owner."""
        victim = self.producer if side == "producer" else self.consumer
        os.kill(victim.pid_of(whom), number)
        note(f"fault: {number.name} {side} {whom}")

    # ── afterwards ───────────────────────────────────────────────────────────

    def recover(self, side: Side, whom: str) -> None:
        """After a kill: the agent comes back by itself, an owner by its supervisor."""
        if whom == "owner":
            begun = time.monotonic()
            assert gone(side.agent, PATIENCE), f"the {side.name}'s agent outlives its owner"
            ended = time.monotonic()
            took = ended - begun - self.stalled(begun, ended)
            assert took < 2.0, f"the {side.name}'s agent outlived its owner by {took:.1f} s"
            side.restart()
        else:
            old = side.agent

            def back() -> bool:
                side.agent = side.ask("facts")["agent"]
                return side.agent not in (0, old)

            eventually(back, f"the {side.name}'s agent is not back")
            side.port = side.ask("facts")["port"]

    def settle(self) -> None:
        """Nothing is under way, nothing pinned, all of the pool free, and transfers work."""
        self.relay.let_pass()
        self.relay.mend(self.producer.port)
        self.producer.ask("give_up")
        if self._asked:
            self.consumer.ask("release", self._asked)
        quiet = {"fetching": 0, "grants": 0, "parked_now": 0, "blocks_pinned": 0}
        for side in (self.producer, self.consumer):

            def at_rest(side: Side = side) -> bool:
                now = side.stats()
                return bool(now) and all(now[name] == value for name, value in quiet.items())

            eventually(at_rest, lambda side=side: f"{side.name} is not at rest: {side.stats()}")
        # A peer that was away fails fetches at once until its connection is back.
        ends: list[dict[str, Any]] = []

        def works() -> bool:
            ends.append(self.transfer())
            return bool(ends[-1]["end"] == "ready")

        eventually(works, lambda: f"no transfer works any more: {ends[-1]}")
        for side in (self.producer, self.consumer):
            side.ask("empty")

            def free(side: Side = side) -> bool:
                now = side.stats()
                return bool(now) and now["blocks_free"] == now["blocks"]

            eventually(free, lambda side=side: f"{side.name} has lost room: {side.stats()}")


def eventually(
    holds: Callable[[], bool], otherwise: str | Callable[[], str], seconds: float = 10.0
) -> None:
    """Wait until something holds; fail with words if it does not."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            raise AssertionError(otherwise if isinstance(otherwise, str) else otherwise())
        time.sleep(0.02)


def gone(pid: int, seconds: float) -> bool:
    """Whether a process ends in so many seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(fd)
