# SPDX-License-Identifier: Apache-2.0
"""Many consumers at once: each an agent of its own, with several fetches under way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from ec_connector.bench.ours import (
    PATIENCE,
    PLANES,
    BenchError,
    Fetcher,
    filled,
    settings_for,
)
from ec_connector.bench.plan import ONE
from ec_connector.bench.results import CrowdCell
from ec_connector.bench.stamps import is_stamped
from ec_connector.bench.stats import summarize
from ec_connector.library import Producer
from ec_connector.protocol.local import Failed, Fetch, FetchItem, Ready, Release

_DIFFERENT = 32


def crowd(
    plane: str, consumers: int, items: int, depth: int, extra: Mapping[str, Any]
) -> CrowdCell:
    """So many consumers fetch so many items of 1 MB each, ``depth`` of them at a time."""
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(Producer(**settings_for(ONE, _DIFFERENT + 1, extra)))
        keys = [f"item-{number}" for number in range(_DIFFERENT + 1)]
        *wanted, spare = filled(producer, ONE, keys)
        members = [
            _Member(
                stack.enter_context(Fetcher(settings_for(ONE, depth + 1, extra, PLANES[plane]))),
                [wanted[(first + number) % _DIFFERENT] for number in range(items)],
                depth,
            )
            for first in range(consumers)
        ]
        for member in members:
            member.warm(spare)
        begun = time.perf_counter()
        for member in members:
            member.start()
        for member in members:
            member.join()
        seconds = time.perf_counter() - begun
    times = [taken for member in members for taken in member.times]
    if not times:
        raise BenchError(f"no fetch of {consumers} consumers by {plane} succeeded")
    return CrowdCell(
        plane=plane,
        nbytes=ONE,
        consumers=consumers,
        depth=depth,
        items=items,
        times=summarize(times),
        rate=len(times) * ONE / seconds,
        lost=consumers * items - len(times),
    )


class _Member(threading.Thread):
    """One consumer. ``times``: seconds of each fetch that brought the right bytes."""

    def __init__(self, fetcher: Fetcher, items: list[FetchItem], depth: int) -> None:
        super().__init__(daemon=True)
        self._fetcher, self._items, self._depth = fetcher, items, depth
        self.times: list[float] = []

    def warm(self, item: FetchItem) -> None:
        """Connect, by an item that is not counted: the first fetch is another question."""
        self._fetcher.fetch(item)
        self._fetcher.release(item.key)

    def run(self) -> None:
        """Fetch everything, the next one as soon as one is answered."""
        todo, under_way = deque(self._items), dict[str, float]()
        until = time.monotonic() + PATIENCE
        while (todo or under_way) and time.monotonic() < until:
            while todo and len(under_way) < self._depth and todo[0].key not in under_way:
                under_way[todo[0].key] = time.perf_counter()
                self._fetcher.link.send(Fetch([todo.popleft()]))
            for event in self._fetcher.link.wait(1.0):
                if isinstance(event, Ready | Failed) and event.key in under_way:
                    self._take(event, time.perf_counter() - under_way.pop(event.key))

    def _take(self, event: Ready | Failed, seconds: float) -> None:
        if isinstance(event, Failed):
            return
        views = self._fetcher.region.views(event.extents, event.nbytes)
        if event.plane != "pool" and is_stamped(views, event.key):
            self.times.append(seconds)
        self._fetcher.link.send(Release([event.key]))
