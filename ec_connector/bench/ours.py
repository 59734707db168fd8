# SPDX-License-Identifier: Apache-2.0
"""Our side of the benchmark: real agents, and clients that take the time of fetches.

A fetch is timed from the call in the client's process to the answer that the
bytes are usable in the consumer's pool.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from msgspec.structs import replace

from ec_connector.agent.link import EngineLink, LinkDown, LinkUp
from ec_connector.bench.plan import SizePlan
from ec_connector.bench.results import ASKED, HIT, MEMORY, ZMQ
from ec_connector.bench.stamps import is_stamped, stamp
from ec_connector.config import Settings
from ec_connector.errors import ECConnectorError
from ec_connector.library import Producer
from ec_connector.pool.region import Region
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import Failed, Fetch, FetchItem, Ready, Release

PATIENCE = 60.0
"""Seconds a fetch may take at most, at the largest size on a slow machine."""
DTYPE = "bfloat16"
PLANES = {MEMORY: ["memory", "zmq"], ZMQ: ["zmq"]}
"""The setting that makes each plane the one in use."""


class BenchError(ECConnectorError):
    """Something was lost, wrong, or not what was to be measured. Ends the run."""


def settings_for(
    nbytes: int, items: int, extra: Mapping[str, Any], planes: list[str] | None = None
) -> dict[str, Any]:
    """Settings with a pool that holds so many items of this size."""
    block = Settings.parse(extra).block_size
    pool = -(-nbytes // block) * block * items
    return {**extra, "pool_size": pool} | ({"planes": planes} if planes else {})


def wanted(key: str, announcement: Mapping[str, Any]) -> FetchItem:
    """The announced item as a fetch."""
    return FetchItem(
        key=key,
        timeout_ms=int(PATIENCE * 1000),
        peer_host=announcement["peer_host"],
        peer_port=announcement["peer_port"],
        nbytes=announcement["size_bytes"],
        dtype=announcement["dtype"],
        shape=list(announcement["shape"]),
    )


def filled(producer: Producer, nbytes: int, keys: list[str]) -> list[FetchItem]:
    """Put stamped items of this size under these keys."""
    rows = np.ones((1, nbytes // 2), np.uint16)
    items = []
    for key in keys:
        stamp(rows.reshape(-1).view(np.uint8), key)
        items.append(wanted(key, producer.put(key, rows, DTYPE)))
    return items


class Fetcher:
    """A consumer's agent and a client of it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.link = EngineLink(Settings.parse(settings), Identity(), "client")
        self.region = Region.open(self.link.start().region, writable=False)

    def fetch(self, item: FetchItem) -> tuple[Ready | Failed, float]:
        """Fetch an item; the answer, and the seconds it took. Release it afterwards."""
        message = Fetch([item])
        begun = time.perf_counter()
        self.link.send(message)
        while time.perf_counter() - begun < PATIENCE:
            for event in self.link.wait(1.0):
                if isinstance(event, Ready | Failed) and event.key == item.key:
                    return event, time.perf_counter() - begun
                if isinstance(event, LinkDown | LinkUp):
                    raise BenchError(f"an agent was lost: {event}")
        raise BenchError(f"{item.key} was not answered within {PATIENCE:g} s")

    def release(self, key: str) -> None:
        """Let an item go."""
        self.link.send(Release([key]))

    def transfer(self, item: FetchItem, plane: str) -> tuple[Ready, float]:
        """Fetch an item, check it and let it go.

        Raises:
            BenchError: it failed, came another way than by ``plane``, or is wrong.
        """
        answer, seconds = self.fetch(item)
        if isinstance(answer, Failed):
            raise BenchError(f"{item.key}: {answer.reason}: {answer.message}")
        if answer.plane != plane:
            raise BenchError(f"{item.key} came by plane {answer.plane}, not {plane}")
        if not is_stamped(self.region.views(answer.extents, answer.nbytes), item.key):
            raise BenchError(f"{item.key} arrived with wrong bytes")
        self.release(item.key)
        return answer, seconds

    def close(self) -> None:
        """End the agent."""
        self.link.close()
        self.region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Transfers:
    """Fetches from one producer by one plane, each of an item that the consumer lacks."""

    def __init__(self, plane: str, fetcher: Fetcher, items: list[FetchItem]) -> None:
        self.name = plane
        self.inside: list[float] = []
        self._fetcher = fetcher
        self._items = items
        self._next = 0

    def turn(self, count: int, uncounted: int) -> list[float]:
        """See :class:`ec_connector.bench.turns.Subject`."""
        times = []
        for number in range(uncounted + count):
            item = self._items[self._next % len(self._items)]
            self._next += 1
            answer, seconds = self._fetcher.transfer(item, self.name)
            if number >= uncounted:
                times.append(seconds)
                self.inside.append(answer.elapsed_us / 1e6)
        return times


class Stage:
    """A part of a fetch on its own."""

    def __init__(
        self, name: str, fetcher: Fetcher, item: FetchItem, ends: Callable[[Ready | Failed], bool]
    ) -> None:
        self.name = name
        self._fetcher = fetcher
        self._item = item
        self._ends = ends

    def turn(self, count: int, uncounted: int) -> list[float]:
        """See :class:`ec_connector.bench.turns.Subject`."""
        times = []
        for number in range(uncounted + count):
            answer, seconds = self._fetcher.fetch(self._item)
            if not self._ends(answer):
                raise BenchError(f"{self._item.key} was answered by {answer}")
            self._fetcher.release(self._item.key)
            if number >= uncounted:
                times.append(seconds)
        return times


@contextlib.contextmanager
def planes(plan: SizePlan, extra: Mapping[str, Any]) -> Iterator[list[Transfers]]:
    """One producer, and a consumer for each plane."""
    keys = [f"item-{number}" for number in range(plan.slots)]
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(Producer(**settings_for(plan.nbytes, plan.slots, extra)))
        items = filled(producer, plan.nbytes, keys)
        yield [
            Transfers(
                plane,
                stack.enter_context(
                    Fetcher(settings_for(plan.nbytes, plan.slots - 1, extra, ways))
                ),
                items,
            )
            for plane, ways in PLANES.items()
        ]


@contextlib.contextmanager
def stages(extra: Mapping[str, Any]) -> Iterator[list[Stage]]:
    """What a fetch takes without a copy: with nothing to do at all, and with a peer that says no.

    The first is the way from the client to its agent and back, the second adds
    the way to the peer and back.
    """
    nbytes = 4096
    with (
        Producer(**settings_for(nbytes, 16, extra)) as producer,
        Fetcher(settings_for(nbytes, 16, extra)) as fetcher,
    ):
        (item,) = filled(producer, nbytes, ["held"])
        fetcher.transfer(item, MEMORY)
        absent = replace(item, key="absent")
        yield [
            Stage(HIT, fetcher, item, lambda answer: getattr(answer, "plane", "") == "pool"),
            Stage(
                ASKED, fetcher, absent, lambda answer: getattr(answer, "reason", "") == "missing"
            ),
        ]


def first_fetches(
    nbytes: int, slots: int, producers: int, extra: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Seconds of the first fetch from each of so many producers, by plane."""
    times: dict[str, list[float]] = {plane: [] for plane in PLANES}
    with contextlib.ExitStack() as stack:
        fetchers = {
            plane: stack.enter_context(Fetcher(settings_for(nbytes, slots - 1, extra, ways)))
            for plane, ways in PLANES.items()
        }
        for number in range(producers):
            with Producer(**settings_for(nbytes, slots, extra)) as producer:
                (item,) = filled(producer, nbytes, [f"first-{number}"])
                for plane, fetcher in fetchers.items():
                    times[plane].append(fetcher.transfer(item, plane)[1])
    return times
