# SPDX-License-Identifier: Apache-2.0
"""What stands in for an engine: a process that owns an agent, and does what its parent says.

It talks to its agent as an engine's scheduler does, and writes and reads the pool's memory as
a worker does. Items are filled by their key, so that wrong bytes are seen.
"""

from __future__ import annotations

import sys
import threading
import time
import zlib
from typing import Any

import msgspec
import numpy as np

from ec_connector.agent.link import EngineLink, LinkDown, LinkUp
from ec_connector.bench.children import serve_parent
from ec_connector.config import Settings
from ec_connector.pool.region import Region
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import (
    AskStats,
    DropAll,
    Failed,
    Fetch,
    FetchItem,
    Ready,
    Release,
    Reserve,
    Reserved,
    ReservedItem,
    ReserveItem,
    Saved,
    SaveFailed,
    Stats,
    StepDone,
)

PATIENCE = 10.0


def content(key: str, nbytes: int) -> np.ndarray[Any, Any]:
    """The bytes of an item."""
    seed = zlib.crc32(key.encode())
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Engine:
    """An agent's owner."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.link = EngineLink(Settings.parse(settings), Identity("hash", {"model": "m"}))
        self.welcome = self.link.start()
        self.region = Region.open(self.welcome.region, writable=True)
        self.ends: dict[str, dict[str, Any]] = {}
        self.open: dict[str, float] = {}
        self.reserved: dict[str, tuple[int, ReservedItem]] = {}
        self.step = 0
        self.seen: list[Any] = []

    # ── commands ─────────────────────────────────────────────────────────────

    def facts(self) -> dict[str, Any]:
        """Who serves, and where."""
        self.listen(0.0)
        return {
            "agent": self.link.agent_pid,
            "endpoint": self.link.endpoint,
            "host": self.welcome.peer_host,
            "port": self.welcome.peer_port,
        }

    def reserve(self, keys: list[str], nbytes: int) -> list[dict[str, Any]]:
        """Room for the items of one step; returns their announcements, or why there is none."""
        self.step += 1
        items = [ReserveItem(key, nbytes, "uint8", [nbytes]) for key in keys]
        self.link.send(Reserve(self.step, self.step, items, replace=True))
        answer = self.until(lambda m: isinstance(m, Reserved) and m.seq == self.step)
        if answer is None:
            return [{"refused": "the agent is lost"} for _ in keys]
        self.reserved.update((place.key, (self.step, place)) for place in answer.items)
        return [self.announcement(place, nbytes) for place in answer.items]

    def save(self, keys: list[str], nbytes: int) -> bool:
        """Fill what was reserved, and have it served; not what a lost agent had reserved."""
        places = [self.reserved.pop(key)[1] for key in keys if key in self.reserved]
        for place in places:
            left = content(place.key, nbytes)
            for view in self.region.views(place.extents, nbytes):
                view[:] = memoryview(left)[: len(view)]
                left = left[len(view) :]
        self.link.send(Saved([(place.key, place.generation) for place in places]))
        # Only of steps of which nothing will be written any more.
        still = [step for step, _ in self.reserved.values()]
        return self.link.send(StepDone(min(still, default=self.step + 1) - 1))

    def fetch(self, item: dict[str, Any], seconds: float) -> bool:
        """Ask for an announced item; :meth:`ended` tells how it goes."""
        wanted = msgspec.convert({**item, "timeout_ms": int(seconds * 1000)}, FetchItem)
        self.ends.pop(wanted.key, None)
        self.open[wanted.key] = time.monotonic()
        if not self.link.send(Fetch([wanted])):
            self.end(wanted.key, {"end": "agent lost"})
        return True

    def ended(self, keys: list[str], seconds: float) -> dict[str, Any]:
        """How fetches ended, of those that did in so many seconds."""
        until = time.monotonic() + seconds
        while any(key in self.open for key in keys) and time.monotonic() < until:
            self.listen(0.05)
        return {key: self.ends[key] for key in keys if key in self.ends}

    def release(self, keys: list[str]) -> bool:
        """Let go of items."""
        return self.link.send(Release(keys))

    def stats(self) -> dict[str, Any]:
        """The agent's counts; empty while there is none."""
        self.step += 1
        if not self.link.send(AskStats(self.step)):
            self.listen(0.05)
            return {}
        answer = self.until(lambda m: isinstance(m, Stats) and m.seq == self.step)
        return answer.values if answer is not None else {}

    def give_up(self, keys: list[str] | None = None) -> bool:
        """Do not save these after all, or anything that was reserved."""
        for key in list(self.reserved) if keys is None else keys:
            if key in self.reserved:
                place = self.reserved.pop(key)[1]
                self.link.send(SaveFailed(key, place.generation, "the encoder failed"))
        return True

    def empty(self) -> bool:
        """Drop every item."""
        return self.link.send(DropAll())

    # ── inside ───────────────────────────────────────────────────────────────

    def announcement(self, place: ReservedItem, nbytes: int) -> dict[str, Any]:
        """What a consumer needs to know."""
        if place.refused:
            return {"refused": place.refused}
        host, port = self.welcome.peer_host, self.welcome.peer_port
        item = FetchItem(place.key, 0, host, port, nbytes, "uint8", [nbytes])
        return dict(msgspec.to_builtins(item))

    def until(self, wanted: Any) -> Any:
        """The message that is wanted; None when the agent is lost meanwhile."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for message in self.listen(0.1):
                if isinstance(message, LinkDown | LinkUp):
                    return None
                if wanted(message):
                    return message
        return None

    def listen(self, seconds: float) -> list[Any]:
        """Take what the agent says."""
        messages = self.link.wait(seconds) if seconds else self.link.poll()
        for message in messages:
            if isinstance(message, Ready):
                self.end(message.key, self.looked_at(message))
            elif isinstance(message, Failed):
                words = {"end": "failed", "reason": message.reason, "message": message.message}
                self.end(message.key, words)
            elif isinstance(message, LinkDown):
                self.reserved.clear()
                for key in list(self.open):
                    self.end(key, {"end": "agent lost"})
            elif isinstance(message, LinkUp):
                self.region.close()
                self.welcome = message.welcome
                self.region = Region.open(self.welcome.region, writable=True)
        return messages

    def end(self, key: str, how: dict[str, Any]) -> None:
        """A fetch ended; one that ends twice is told apart."""
        begun = self.open.pop(key, None)
        if begun is None:
            how = {"end": "twice", "again": how, "first": self.ends.get(key)}
        else:
            how = {**how, "seconds": time.monotonic() - begun}
        self.ends[key] = how

    def looked_at(self, ready: Ready) -> dict[str, Any]:
        """An arrival: whether its bytes are those of its key."""
        views = self.region.views(ready.extents, ready.nbytes)
        raw = np.concatenate([np.frombuffer(view, np.uint8) for view in views])
        right = bool(np.array_equal(raw, content(ready.key, ready.nbytes)))
        return {"end": "ready" if right else "WRONG BYTES", "plane": ready.plane}


def main() -> None:
    """Serve the parent until it is done."""
    engine = Engine(msgspec.json.decode(sys.argv[1]))
    one_at_a_time, done = threading.Lock(), threading.Event()

    def listen() -> None:
        # So that what ends is noted when it does, not when somebody asks.
        while not done.wait(0.01):
            with one_at_a_time:
                engine.listen(0.0)

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        for (name, *arguments), answer in serve_parent():
            with one_at_a_time:
                result = getattr(engine, name)(*arguments)
            answer(result)
    finally:
        done.set()
        listener.join()
        engine.region.close()
        engine.link.close()


if __name__ == "__main__":
    main()
