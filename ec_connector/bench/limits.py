# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at best: a memcpy, a bare ZMQ transfer, a bare round trip."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import zmq

from ec_connector.bench.children import Child
from ec_connector.bench.ours import BenchError
from ec_connector.bench.plan import SizePlan
from ec_connector.bench.results import BARE_ZMQ, MEMCPY, PING_IPC, PING_TCP

PATIENCE_MS = 60_000
START_SECONDS = 30.0
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Memcpy:
    """Copies between warm buffers, each time from and to another place."""

    name = MEMCPY

    def __init__(self, plan: SizePlan, source: Bytes, target: Bytes) -> None:
        self._plan, self._source, self._target = plan, source, target
        self._next = 0

    def turn(self, count: int, uncounted: int) -> list[float]:
        """See :class:`ec_connector.bench.turns.Subject`."""
        times = []
        size, slots = self._plan.nbytes, self._plan.slots
        for number in range(uncounted + count):
            start = self._next % slots * size
            end = self._next % (slots - 1) * size
            self._next += 1
            source = self._source[start : start + size]
            target = self._target[end : end + size]
            begun = time.perf_counter()
            target[:] = source
            if number >= uncounted:
                times.append(time.perf_counter() - begun)
        return times


class Bare:
    """A ZMQ request whose reply is received straight into a warm buffer. No protocol."""

    def __init__(
        self, name: str, dealer: zmq.Socket[bytes], plan: SizePlan | None, target: Bytes
    ) -> None:
        self.name = name
        self._dealer, self._plan, self._target = dealer, plan, target.data
        self._next = 0

    def turn(self, count: int, uncounted: int) -> list[float]:
        """See :class:`ec_connector.bench.turns.Subject`."""
        times = []
        for number in range(uncounted + count):
            request, place = self._order()
            self._next += 1
            begun = time.perf_counter()
            self._dealer.send(request)
            length = self._dealer.recv_into(place)
            if number >= uncounted:
                times.append(time.perf_counter() - begun)
            if length != len(place):
                raise BenchError(f"{self.name}: {length} bytes came, {len(place)} were due")
        return times

    def _order(self) -> tuple[bytes, memoryview]:
        if self._plan is None:
            return b"", self._target[:0]
        size, slots = self._plan.nbytes, self._plan.slots
        end = self._next % (slots - 1) * size
        request = (self._next % slots).to_bytes(8, "little")
        return request, self._target[end : end + size]


@contextlib.contextmanager
def limits(plan: SizePlan, *, pings: bool) -> Iterator[list[Memcpy | Bare]]:
    """The limits at a size; with ``pings`` the round trips as well."""
    size = plan.nbytes * plan.slots
    fd = os.memfd_create("ec_connector_bench", os.MFD_CLOEXEC)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        os.ftruncate(fd, size)
        source = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        source[:] = 1
        target = np.ones(plan.nbytes * (plan.slots - 1), np.uint8)
        words = [str(number) for number in (fd, size, plan.nbytes)]
        far_end = stack.enter_context(Child("ec_connector.bench.echo", words, pass_fds=[fd]))
        tcp, ipc = far_end.ask("endpoints", START_SECONDS)
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)

        def bare(name: str, endpoint: str, with_payload: bool) -> Bare:
            dealer = context.socket(zmq.DEALER)
            for option, value in ((zmq.RCVHWM, 0), (zmq.RCVTIMEO, PATIENCE_MS)):
                dealer.setsockopt(option, value)
            dealer.connect(endpoint)
            return Bare(name, dealer, plan if with_payload else None, target)

        subjects: list[Memcpy | Bare] = [
            Memcpy(plan, source, target),
            bare(BARE_ZMQ, tcp, True),
        ]
        if pings:
            subjects += [bare(PING_TCP, tcp, False), bare(PING_IPC, ipc, False)]
        yield subjects
