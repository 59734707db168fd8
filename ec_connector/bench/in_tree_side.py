# SPDX-License-Identifier: Apache-2.0
"""One side of vLLM's in-tree encoder-cache transfer, driven from outside: a child process.

vLLM's own sessions, cache, region and NIXL transport; only the engine around
them is missing. Where an engine would poll once a step, these poll all the
time with a pause of 50 microseconds: without one they would take the
processor from UCX's own threads, and with an engine's step between two polls
they would be slower by that step.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from typing import Any

import numpy as np
from vllm.distributed.ec_transfer.ec_connector.cpu.control.zmq import (
    ZmqClientTransport,
    ZmqServerTransport,
)
from vllm.distributed.ec_transfer.ec_connector.cpu.data.nixl import NixlDataTransport
from vllm.distributed.ec_transfer.ec_connector.cpu.ec_shared_region import ECSharedRegion
from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler.embedding_cache import EmbeddingCache
from vllm.distributed.ec_transfer.ec_connector.cpu.session import ConsumerSession, ProducerSession

from ec_connector.bench.children import serve_parent
from ec_connector.bench.plan import ROW
from ec_connector.bench.stamps import STAMP_BYTES, stamp_of

PAUSE = 50e-6
TIMEOUT = 60.0
HOST = "127.0.0.1"


class Stack:
    """A region of rows, its bookkeeping and its NIXL agent."""

    def __init__(self, role: str, number: int, blocks: int) -> None:
        name = f"bench-{role}-{os.getpid()}-{number}"
        self.region = ECSharedRegion(name, blocks, ROW)
        # Nobody else opens it by name, and so nothing is left behind by a process that is killed.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/vllm_ec_{name}.mmap")  # noqa: S108 - vLLM chose the name
        self.memory = self.region.blocks.numpy().view(np.uint8)
        self.data = NixlDataTransport(
            name, self.region.blocks.data_ptr(), blocks, ROW, blocks * ROW
        )
        self.cache = EmbeddingCache(blocks)

    def reserve(self, key: str, rows: int) -> Any:
        """Room for an item."""
        entry = self.cache.alloc(key, rows, (rows, ROW // 2))
        if entry is None:
            raise MemoryError(f"no room for {key}")
        return entry

    def places(self, entry: Any) -> list[Any]:
        """Where an item's stamps are: its first, middle and last row."""
        blocks = entry.block_ids
        return [
            self.memory[block, :STAMP_BYTES]
            for block in (blocks[0], blocks[len(blocks) // 2], blocks[-1])
        ]

    def close(self) -> None:
        """Let everything go."""
        self.data.deregister()
        del self.data, self.memory
        self.region.cleanup()


class Producer:
    """Serves items that it holds from the start."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Stack, ProducerSession]] = {}
        self._stacks = 0

    def open(self, rows: int, blocks: int, keys: list[str]) -> dict[str, int]:
        """Another producer, with its items. Returns its number, port and ack's size."""
        self._stacks += 1
        stack = Stack("producer", self._stacks, blocks)
        stack.memory[:] = 1
        for key in keys:
            entry = stack.reserve(key, rows)
            for place in stack.places(entry):
                place[:] = np.frombuffer(stamp_of(key), np.uint8)
            stack.cache.mark_ready(key)
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        session = ProducerSession(ZmqServerTransport(HOST, port), stack.data, stack.cache, "bench")
        self._open[self._stacks] = (stack, session)
        ack = len(stack.data.get_agent_metadata()) + len(stack.data.get_mem_descriptor())
        return {"number": self._stacks, "port": port, "ack": ack}

    def serve(self, number: int, busy: float = 0.0) -> None:
        """Serve until the next order; for the first ``busy`` seconds the engine is in a step."""
        _, session = self._open[number]
        order = select.poll()
        order.register(sys.stdin, select.POLLIN | select.POLLHUP)
        time.sleep(busy)
        while not order.poll(0):
            session.poll_step()
            time.sleep(PAUSE)

    def hold(self) -> None:
        """An order that does nothing: it ends :meth:`serve`."""

    def close(self, number: int) -> None:
        """End one producer."""
        stack, session = self._open.pop(number)
        session.close()
        del session
        stack.close()


class Consumer:
    """Fetches items, in turn and for ever, into a cache that holds one less than there are."""

    def __init__(self) -> None:
        self._stacks = 0

    def open(self, rows: int, blocks: int, keys: list[str]) -> None:
        """A cache, empty."""
        self._stacks += 1
        self._stack = Stack("consumer", self._stacks, blocks)
        self._stack.memory[:] = 1
        self._transport = ZmqClientTransport()
        self._rows, self._keys, self._next = rows, keys, 0

    def connect(self, port: int) -> None:
        """The producer that :meth:`fetch` asks."""
        self._session, self._address = self._dial(port), (HOST, port)

    def fetch(self, count: int, uncounted: int) -> list[float]:
        """Seconds of each fetch."""
        times = []
        for _ in range(uncounted + count):
            key = self._keys[self._next % len(self._keys)]
            self._next += 1
            entry = self._stack.reserve(key, self._rows)
            begun = time.perf_counter()
            self._transfer(self._session, self._address, key, entry)
            times.append(time.perf_counter() - begun)
            self._settle(key, entry)
        return times[uncounted:]

    def first(self, port: int, key: str) -> float:
        """Seconds of the first fetch from a producer, connecting included."""
        entry = self._stack.reserve(key, self._rows)
        begun = time.perf_counter()
        session = self._dial(port)
        self._transfer(session, (HOST, port), key, entry)
        seconds = time.perf_counter() - begun
        self._settle(key, entry)
        session.close()
        return seconds

    def rest(self, seconds: float) -> float:
        """Processor time, as a share of one core, of this process while it does nothing."""
        begun = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - begun) / seconds

    def close(self) -> None:
        """Drop the cache and the connection."""
        self._session.close()
        self._transport.close()
        self._stack.close()
        del self._session, self._stack

    def _dial(self, port: int) -> ConsumerSession:
        address = (HOST, port)
        connection = self._transport.connect(address)
        return ConsumerSession(address, connection, self._transport, self._stack.data, "bench")

    def _transfer(
        self, session: ConsumerSession, address: tuple[str, int], key: str, entry: Any
    ) -> None:
        session.start_xfer(key, list(entry.block_ids), time.monotonic() + TIMEOUT)
        while True:
            session.poll(self._transport.poll().get(address, []), time.monotonic())
            results = session.take_results()
            if key in results.completed:
                return
            if results.tombstoned or results.retryable or results.quarantined:
                raise RuntimeError(f"{key} failed: {results}")
            time.sleep(PAUSE)

    def _settle(self, key: str, entry: Any) -> None:
        self._stack.cache.mark_ready(key)
        mark = stamp_of(key)
        if any(place.tobytes() != mark for place in self._stack.places(entry)):
            raise RuntimeError(f"{key} arrived with wrong bytes")


def main() -> None:
    """Carry out orders: ``[name, {argument: value}]``, each answered by its result."""
    side: Producer | Consumer = Producer() if sys.argv[1] == "producer" else Consumer()
    for (name, arguments), answer in serve_parent():
        answer(getattr(side, name)(**arguments))


if __name__ == "__main__":
    main()
