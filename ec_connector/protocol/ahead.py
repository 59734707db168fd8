# SPDX-License-Identifier: Apache-2.0
"""Fetching ahead: items that a router named, before an engine asks for them.

Rules:

1. A hint is checked as an engine's request is, and fetched by the same machine, for the client
   :data:`~ec_connector.protocol.fetch.AHEAD`, which lets go of what arrives at once: the item
   stays in the pool, evictable.
2. At most ``MOST`` at one time, and no more than a ``SHARE``-th of the pool. What is here already,
   does not fit, or would need one of the last connections is dropped, and counted.
3. Nothing here costs an engine's request anything: what is fetched ahead makes way for room that
   an engine needs (:meth:`Ahead.make_way`), and for an announcement that says otherwise
   (``ConsumerMachine.fetch``). It replaces nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from ec_connector.errors import MismatchError
from ec_connector.pool.blocks import BlockPool
from ec_connector.protocol.consumer import ConsumerMachine
from ec_connector.protocol.effects import Effect
from ec_connector.protocol.fetch import AHEAD
from ec_connector.protocol.hint import MAX_LINE_BYTES, OUTCOMES, read_hint
from ec_connector.protocol.local import Failed, FetchItem, Ready, Reserve, ToClient

MOST: Final = 64
SHARE: Final = 4
LINES_A_SECOND: Final = 1000.0
"""Lines read of a router, ``BURST`` of them at once; those beyond wait at the router."""
BURST: Final = 256


class Ahead:
    """What one agent fetches ahead.

    Args:
        pool: the agent's.
        consumer: fetches.
        timeout: seconds after which an item that is not there is given up.
    """

    def __init__(self, pool: BlockPool, consumer: ConsumerMachine, timeout: float) -> None:
        self._pool = pool
        self._consumer = consumer
        self._timeout = timeout
        self._running: dict[str, int] = {}  # blocks
        self.counts: Counter[str] = Counter({f"ahead_{outcome}": 0 for outcome in OUTCOMES})

    def hint(self, line: bytes, now: float) -> list[Effect]:
        """A router named an item."""
        try:
            item = read_hint(line, self._timeout)
        except MismatchError:
            self._count("malformed")
            return []
        if why := self._objection(item):
            self._count(why)
            return []
        self._running[item.key] = self._blocks(item.nbytes)
        return self._consumer.fetch(AHEAD, item, now)

    def told(self, message: ToClient, now: float) -> list[Effect]:
        """How a fetch ended."""
        if not isinstance(message, Ready | Failed):
            return []
        self._running.pop(message.key, None)
        if isinstance(message, Failed):
            self._count("failed")
            return []
        self._count("fetched")
        return self._consumer.release(AHEAD, message.key, now)

    def make_way(self, now: float) -> list[Effect]:
        """An engine's fetch waits for room: give up what nobody has asked for."""
        return self._give_up([*self._running], now) if self._consumer.waits_for_room() else []

    def make_way_for(self, reserve: Reserve, now: float) -> list[Effect]:
        """The same for what an engine is about to save, be it the same items."""
        need = sum(self._blocks(item.nbytes) for item in reserve.items)
        if need > self._room():
            return self._give_up([*self._running], now)
        keys = [item.key for item in reserve.items if item.key in self._running]
        return self._give_up(keys, now)

    def gauges(self) -> dict[str, int]:
        """Fetches under way that no engine has asked for, or had not when they began."""
        return {"fetching_ahead": len(self._running)}

    def _objection(self, item: FetchItem) -> str:
        if why := self._consumer.objection(item):
            return why
        need = self._blocks(item.nbytes)
        used = sum(self._running.values())
        many = len(self._running) >= MOST
        large = SHARE * (used + need) > self._pool.num_blocks or need > self._room()
        return "no_room" if many or large else ""

    def _give_up(self, keys: list[str], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for key in keys:
            del self._running[key]
            self._count("made_way")
            effects += self._consumer.release(AHEAD, key, now)
        return effects

    def _room(self) -> int:
        usage = self._pool.usage()
        return usage.free + usage.ready - usage.pinned

    def _blocks(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self._pool.block_bytes))

    def _count(self, outcome: str) -> None:
        self.counts[f"ahead_{outcome}"] += 1


class Lines:
    """A stream of bytes cut into lines. Of one that is too long the beginning is kept."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in these bytes, but for empty ones: they keep a connection alive."""
        *ended, rest = data.split(b"\n")
        lines = []
        for part in ended:
            self._more(part)
            if self._begun:
                lines.append(bytes(self._begun))
            self._begun.clear()
        self._more(rest)
        return lines

    def _more(self, part: bytes) -> None:
        self._begun += part[: MAX_LINE_BYTES + 1 - len(self._begun)]


class Pace:
    """How long to read nothing, so that no more than ``LINES_A_SECOND`` are read."""

    def __init__(self, now: float) -> None:
        self._left = float(BURST)
        self._at = now

    def pause(self, lines: int, now: float) -> float:
        """So many lines were read; the seconds to wait before more are."""
        self._left = min(BURST, self._left + (now - self._at) * LINES_A_SECOND) - lines
        self._at = now
        return max(0.0, -self._left / LINES_A_SECOND)
