# SPDX-License-Identifier: Apache-2.0
"""vLLM's in-tree transfer as subjects, where vLLM and NIXL are installed.

Its two processes are stopped whenever it is not their turn: NIXL's own threads
take a third of a core even while nothing is asked of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Iterator
from typing import Any

from ec_connector.bench.children import Child
from ec_connector.bench.plan import ROW, WORKING_SET, SizePlan
from ec_connector.bench.results import IN_TREE, IN_TREE_TCP

TRANSPORTS = {IN_TREE: {}, IN_TREE_TCP: {"UCX_TLS": "tcp,self"}}
START_SECONDS = 180.0
OPEN_SECONDS = 120.0
TURN_SECONDS = 600.0


def why_not() -> str:
    """Why the in-tree pair cannot be measured here; empty if it can."""
    missing = [name for name in ("vllm", "nixl") if importlib.util.find_spec(name) is None]
    if missing:
        return f"the in-tree pair is not measured: {' and '.join(missing)} not installed"
    return ""


class Pair:
    """A producer and a consumer of the in-tree transfer, over one kind of transport."""

    def __init__(self, name: str) -> None:
        self.name = name
        env = TRANSPORTS[name]
        side = "ec_connector.bench.in_tree_side"
        self._producer = Child(side, ["producer"], env=env)
        try:
            self._consumer = Child(side, ["consumer"], env=env)
        except OSError:
            self._producer.close()
            raise
        self._number = 0
        self.ack_bytes = self.blocks = 0

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Both processes run in here, and only in here."""
        for child in (self._producer, self._consumer):
            child.resume()
        try:
            yield
        finally:
            for child in (self._producer, self._consumer):
                child.pause()

    @contextlib.contextmanager
    def opened(self, plan: SizePlan) -> Iterator[None]:
        """Memory and items of a size; :meth:`turn` fetches these."""
        rows = plan.nbytes // ROW
        self.blocks = max(WORKING_SET // ROW, plan.slots * rows)
        keys = [f"item-{number}" for number in range(plan.slots)]
        with self.awake():
            held = self._open(rows, self.blocks, keys)
            blocks = max(rows, self.blocks - rows)
            self._consume("open", OPEN_SECONDS, rows=rows, blocks=blocks, keys=keys)
            self._consume("connect", OPEN_SECONDS, port=held["port"])
        self._number, self.ack_bytes = held["number"], held["ack"]
        try:
            yield
        finally:
            with self.awake():
                self._consume("close", OPEN_SECONDS)
                self._produce("close", number=self._number)

    def turn(self, count: int, uncounted: int) -> list[float]:
        """See :class:`ec_connector.bench.turns.Subject`."""
        with self.awake(), self._serving(self._number):
            times: list[float] = self._consume(
                "fetch", TURN_SECONDS, count=count, uncounted=uncounted
            )
        return times

    def first(self, producers: int) -> list[float]:
        """Seconds of the first fetch from each of so many new producers; inside ``opened``."""
        times = []
        with self.awake():
            for number in range(producers):
                key = f"first-{number}"
                held = self._open(self._rows, self.blocks, [key])
                with self._serving(held["number"]):
                    times.append(self._consume("first", TURN_SECONDS, port=held["port"], key=key))
                self._produce("close", number=held["number"])
        return times

    def during_step(self, seconds: float) -> float:
        """Seconds of one fetch while the producer's engine is in a step of so many."""
        with self.awake(), self._serving(self._number, busy=seconds):
            times: list[float] = self._consume("fetch", TURN_SECONDS, count=1, uncounted=0)
        return times[0]

    def rest(self, seconds: float) -> float:
        """Share of a core that the consumer's process takes while nothing is asked of it."""
        with self.awake():
            return float(self._consume("rest", TURN_SECONDS, seconds=seconds))

    def close(self) -> None:
        """End both processes."""
        # Each takes seconds to wind up, so side by side.
        closing = [
            threading.Thread(target=child.close) for child in (self._producer, self._consumer)
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _open(self, rows: int, blocks: int, keys: list[str]) -> dict[str, Any]:
        self._rows = rows
        held: dict[str, Any] = self._producer.ask(
            ["open", {"rows": rows, "blocks": blocks, "keys": keys}], START_SECONDS
        )
        return held

    @contextlib.contextmanager
    def _serving(self, number: int, busy: float = 0.0) -> Iterator[None]:
        self._producer.send(["serve", {"number": number, "busy": busy}])
        try:
            yield
        finally:
            self._producer.send(["hold", {}])
            for _ in range(2):
                self._producer.answer(OPEN_SECONDS)

    def _produce(self, order: str, **arguments: Any) -> Any:
        return self._producer.ask([order, arguments], OPEN_SECONDS)

    def _consume(self, order: str, timeout: float, **arguments: Any) -> Any:
        return self._consumer.ask([order, arguments], timeout)


@contextlib.contextmanager
def pairs() -> Iterator[list[Pair]]:
    """Both transports; none where they cannot be had (see :func:`why_not`)."""
    with contextlib.ExitStack() as stack:
        started = []
        for name in TRANSPORTS if not why_not() else ():
            pair = Pair(name)
            stack.callback(pair.close)
            started.append(pair)
        yield started
