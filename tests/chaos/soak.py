# SPDX-License-Identifier: Apache-2.0
"""Random load, and a random fault every few seconds, for as long as you like.

    python -m tests.chaos.soak [SECONDS] [SEED]

A producer, a consumer and a network between them; every 30 s all must be at rest, whole and
able to transfer. Ends with a report of one page, and with exit status 1 if a request was late,
bytes were wrong, or anything was lost or left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from tests.chaos.world import GRACE, LANDED, Side, World, gone

OPEN = 8
"""Fetches under way at most."""
PAUSE = (0.5, 3.0)
"""Seconds between two faults."""
REST_EVERY = 30.0
Signal = signal.Signals


class Stalls:
    """When a processor let nobody run: on a crowded machine everything is late, agents too."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(cpu,), daemon=True)
            for cpu in os.sched_getaffinity(0)
        ]
        for thread in self._threads:
            thread.start()

    def between(self, begun: float, ended: float) -> float:
        """Seconds of it in this time, those of several processors added up."""
        return sum(max(0.0, min(to, ended) - max(since, begun)) for since, to in list(self.found))

    def close(self) -> None:
        """Watch no more."""
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _watch(self, cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})  # of this thread alone
        before = time.monotonic()
        while not self._done.wait(0.02):
            now = time.monotonic()
            if now - before > 0.2:
                self.found.append((before, now))
            before = now


class Soak:
    """The world, the load on it, and what became of each request."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.open: dict[str, tuple[float, float]] = {}
        self.unsaved: list[tuple[str, int]] = []
        self.stalls = Stalls()
        world.stalled = self.stalls.between
        self.endings: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.worst = 0.0
        self.rests = 0
        self.asked = 0

    # ── load ─────────────────────────────────────────────────────────────────

    def load(self, seconds: float) -> None:
        """Ask, save and let go for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if len(self.open) < OPEN:
                self.ask()
            if self.unsaved and self.random.random() < 0.3:
                key, nbytes = self.unsaved.pop()
                if self.random.random() < 0.2:
                    self.world.producer.ask("give_up", [key])
                else:
                    self.world.producer.ask("save", [key], nbytes)
            self.collect(0.02)

    def ask(self) -> None:
        """One more request: for an item that is there, is being saved, or never comes."""
        key = f"item-{self.asked}"
        self.asked += 1
        nbytes = int(2 ** self.random.uniform(10, 21))
        kind = self.random.choices(["saved", "parked", "never"], [8, 3, 1])[0]
        item = self.world.producer.ask("reserve", [key], nbytes)[0]
        if "refused" in item:
            self.endings["not announced"] += 1
            return
        if kind == "parked":
            self.unsaved.append((key, nbytes))
        else:
            self.world.producer.ask("save", [key], nbytes)
        if kind == "never":
            item["key"] = f"{key}-unknown"
        seconds = self.random.uniform(0.3, 3.0)
        self.world.consumer.ask("fetch", self.world.through_relay(item), seconds)
        self.open[item["key"]] = (time.monotonic(), seconds)

    def collect(self, seconds: float) -> None:
        """Note what has ended, and what should have."""
        ends = self.world.consumer.ask("ended", list(self.open), seconds)
        now = time.monotonic()
        for key, end in ends.items():
            begun, allowed = self.open.pop(key)
            waited = end.get("seconds", 0.0)
            allowed += self.stalls.between(begun, begun + waited)
            self.worst = max(self.worst, waited - allowed)
            what = end["end"] + (f" ({end['reason']})" if "reason" in end else "")
            self.endings[what] += 1
            if end["end"] not in ("ready", "failed", "agent lost"):
                self.wrong.append(f"{key}: {end}")
            if waited > allowed + GRACE:
                self.wrong.append(f"{key} ended {waited - allowed:.1f} s late: {end}")
        self.world.consumer.ask("release", list(ends))
        for key, (begun, allowed) in list(self.open.items()):
            if now - begun > allowed + 10.0:
                del self.open[key]
                self.wrong.append(f"{key} never ended")

    # ── faults ───────────────────────────────────────────────────────────────

    def fault(self) -> None:
        """One of them, and its end."""
        name, inject = self.random.choice(list(self.kinds().items()))
        self.faults[name] += 1
        inject()

    def kinds(self) -> dict[str, Callable[[], None]]:
        """Faults by name."""
        kinds: dict[str, Callable[[], None]] = {
            "black hole": self.black_hole,
            "connections cut": self.cut,
            "delay": self.delay,
            "weights changed": lambda: self.world.producer.ask("empty"),
        }
        for side in (self.world.producer, self.world.consumer):
            for whom in ("agent", "owner"):
                kinds[f"kill {side.name}'s {whom}"] = lambda s=side, w=whom: self.kill(s, w)
                kinds[f"stop {side.name}'s {whom}"] = lambda s=side, w=whom: self.stop(s, w)
        return kinds

    def black_hole(self) -> None:
        """Nothing passes for a while."""
        self.world.relay.hold()
        self.load(self.random.uniform(0.2, 3.0))
        self.world.relay.let_pass()

    def cut(self) -> None:
        """Nobody is reached for a while."""
        self.world.relay.cut()
        self.load(self.random.uniform(0.1, 2.0))
        self.world.relay.mend()

    def delay(self) -> None:
        """Everything is late from now on."""
        self.world.relay.delay = self.random.choice([0.0, 0.0, 0.01, 0.1])

    def kill(self, side: Side, whom: str) -> None:
        """It dies, and comes back."""
        os.kill(side.pid_of(whom), Signal.SIGKILL)
        if whom == "owner" and side is self.world.consumer:
            self.endings["engine killed"] += len(self.open)
            self.open.clear()
        if side is self.world.producer:
            self.unsaved.clear()
        self.world.recover(side, whom)
        self.world.relay.mend(self.world.producer.port)

    def stop(self, side: Side, whom: str) -> None:
        """It does nothing for a while."""
        seconds = self.random.uniform(0.1, 2.0)
        os.kill(side.pid_of(whom), Signal.SIGSTOP)
        begun = time.monotonic()
        while time.monotonic() < begun + seconds:
            if side is self.world.consumer:
                time.sleep(0.05)
            else:
                self.collect(0.05)
        if side is self.world.consumer:
            # Who is stopped cannot tell the time.
            stopped = time.monotonic() - begun
            self.open = {key: (at, allowed + stopped) for key, (at, allowed) in self.open.items()}
        os.kill(side.pid_of(whom), Signal.SIGCONT)

    # ── the whole ────────────────────────────────────────────────────────────

    def rest(self) -> None:
        """Let all end, then see that both sides are whole."""
        for key, nbytes in self.unsaved:
            self.world.producer.ask("save", [key], nbytes)
        self.unsaved.clear()
        until = time.monotonic() + 20.0
        while self.open and time.monotonic() < until:
            self.collect(0.1)
        self.world.relay.delay = 0.0
        self.world.settle()
        self.rests += 1

    def run(self, seconds: float) -> None:
        """All of it."""
        until = time.monotonic() + seconds
        rest = time.monotonic() + REST_EVERY
        while time.monotonic() < until and not self.wrong:
            self.load(self.random.uniform(*PAUSE))
            self.fault()
            if time.monotonic() > rest:
                self.rest()
                rest = time.monotonic() + REST_EVERY
        self.rest()


def report(soak: Soak, seconds: float, left: list[int]) -> str:
    """The page."""

    def table(counts: Counter[str]) -> list[str]:
        return [f"  {count:6}  {name}" for name, count in sorted(counts.items())]

    stalled = sum(to - since for since, to in soak.stalls.found)
    lines = [
        f"soak of {seconds:.0f} s",
        f"requests: {sum(soak.endings.values())}",
        "faults by kind:",
        *table(soak.faults),
        "endings by kind:",
        *table(soak.endings),
        f"worst wait beyond a deadline: {max(0.0, soak.worst):.2f} s",
        f"stalls of the machine, not counted as waits: {stalled:.1f} s in all",
        f"times at rest with both pools whole: {soak.rests}",
        f"processes left: {len(left)}",
        f"late, wrong or lost: {len(soak.wrong)}",
        *(f"  {what}" for what in soak.wrong),
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run it; the exit status."""
    seconds = float(arguments[0]) if arguments else 600.0
    seed = int(arguments[1]) if len(arguments) > 1 else int(time.time())
    print(f"seed {seed}", flush=True)
    agents: list[int] = []
    with World() as world:
        soak = Soak(world, seed)
        try:
            soak.run(seconds)
        except Exception as error:
            soak.wrong.append(f"{type(error).__name__}: {error}")
        soak.stalls.close()
        agents += [world.producer.agent, world.consumer.agent]
    left = [pid for pid in agents if not gone(pid, 5.0)]
    LANDED.clear()
    print(report(soak, seconds, left))
    return int(bool(soak.wrong or left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
