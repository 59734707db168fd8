# SPDX-License-Identifier: Apache-2.0
"""Packing and unpacking payload beside the loop, in a few threads that live with the agent.

A run takes milliseconds, in which the loop would answer nobody. Threads read the pool (under
a grant's pin) and their own buffers only; whatever is sent, and whatever is written into the
pool, is the loop's doing, so a fetch that ended in the meantime is not written to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from ec_connector.agent.reactor import Reactor
from ec_connector.agent.transmit import span_views
from ec_connector.codecs.choice import EXACT, LOSS, lacking, loss_of, usable_codecs
from ec_connector.errors import CodecError, ConfigError, InternalError
from ec_connector.pool.region import Region
from ec_connector.protocol.account import PACKING
from ec_connector.protocol.effects import SendToConsumer, Unpack
from ec_connector.protocol.fingerprint import Identity, usable_factors

if TYPE_CHECKING:
    # An agent that packs nothing does without numpy: 10 MB, and a tenth of a second.
    from ec_connector.codecs.work import Bytes, Packed

logger = logging.getLogger("vllm.ec_connector.agent")

T = TypeVar("T")

THREADS: Final = 2
MOST_STARTED: Final = 2 * THREADS
"""Runs packed ahead of the loop; the others wait without memory of their own."""
LEAVING_BYTES: Final = 64 * 1024 * 1024
"""Packed bytes in ZMQ's hands, over all peers. Beyond it nothing more is packed for a peer that
has some of them, so those on slow links cannot hold up the others."""


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What a job gave, and the seconds that it took."""

    value: T
    seconds: float


class Workers:
    """The threads, started by their first job. Idle ones sleep, and wake nobody."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._threads = ThreadPoolExecutor(THREADS, "ec-codec")
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        reactor.add(self._wake_out, self._woken)

    def start(self, job: Callable[[], T]) -> Future[Timed[T]]:
        """Have a thread do it. The reactor's turn ends when it is done."""
        future = self._threads.submit(_timed, job)
        future.add_done_callback(self._wake)
        return future

    def close(self) -> None:
        """End the threads. What they are at is finished first, what waits is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._reactor.remove(self._wake_out)
        os.close(self._wake_out)
        os.close(self._wake_in)

    def _wake(self, _: Future[Any]) -> None:
        with contextlib.suppress(BlockingIOError):  # a wake-up is due already
            os.write(self._wake_in, b"x")

    def _woken(self) -> None:
        os.read(self._wake_out, 4096)


@dataclass(slots=True)
class _Packing:
    effect: SendToConsumer
    future: Future[Timed[Packed | None]]
    wanted: bool = True


class Packer:
    """Runs on their way to consumers. Peers take turns; those of one peer stay in order.

    Args:
        region: the pool's memory.
        workers: who does it.
        leaving: packed bytes that were handed out and have not left the process, by peer.
    """

    def __init__(
        self, region: Region, workers: Workers, leaving: Callable[[], Mapping[bytes, int]]
    ) -> None:
        self._region = region
        self._workers = workers
        self._leaving = leaving
        self._waiting: dict[bytes, deque[SendToConsumer]] = {}  # whose turn is next comes first
        self._started: deque[_Packing] = deque()
        self.faults = 0

    def start(self, effect: SendToConsumer) -> None:
        """Pack a chunk's payload; :meth:`next` hands it out."""
        self._waiting.setdefault(effect.peer, deque()).append(effect)
        self._begin()

    def next(self) -> tuple[SendToConsumer, Packed | None] | None:
        """The next chunk to send: packed, or as it is (None). None: there is none now."""
        self._begin()
        while self._started and self._started[0].future.done():
            job = self._started.popleft()
            self._begin()
            if job.wanted:
                return job.effect, self._result(job)
        return None

    def _result(self, job: _Packing) -> Packed | None:
        try:
            done = job.future.result()
            if job.effect.account is not None:
                job.effect.account.add(PACKING, done.seconds)
            return done.value
        except Exception as error:  # whatever a library raises: the rows themselves are good
            self.faults += 1
            if self.faults & (self.faults - 1) == 0:  # 1, 2, 4, 8 ... times
                logger.error(
                    "mm_hash=%s not packed with %s (%d so far), sent as it is: %r",
                    job.effect.payload.entry.key if job.effect.payload else "",
                    job.effect.codec,
                    self.faults,
                    error,
                )
            return None

    def stop(self, grant: str) -> list[Future[Timed[Packed | None]]]:
        """Drop what is to be packed for a grant. Returns those that still read its bytes."""
        for peer, queue in list(self._waiting.items()):
            kept = deque(effect for effect in queue if effect.grant != grant)
            if kept:
                self._waiting[peer] = kept
            else:
                del self._waiting[peer]
        reading = []
        for job in self._started:
            if job.effect.grant == grant:
                job.wanted = False
                if not job.future.cancel() and not job.future.done():
                    reading.append(job.future)
        return reading

    def held_up(self) -> bool:
        """Whether something waits for packed bytes to leave, of which nothing tells."""
        return bool(self._waiting) and len(self._started) < MOST_STARTED

    def _begin(self) -> None:
        while self._waiting and len(self._started) < MOST_STARTED:
            effect = self._take()
            if effect is None:
                return
            self._started.append(_Packing(effect, self._workers.start(self._job(effect))))

    def _take(self) -> SendToConsumer | None:
        leaving = self._leaving()
        full = sum(leaving.values()) > LEAVING_BYTES
        for peer in self._waiting:
            if not full or not leaving.get(peer):
                queue = self._waiting.pop(peer)
                effect = queue.popleft()
                if queue:
                    self._waiting[peer] = queue
                return effect
        return None

    def _job(self, effect: SendToConsumer) -> Callable[[], Packed | None]:
        span = effect.payload
        if span is None:
            raise InternalError(f"a chunk of {effect.grant} to be packed, and no bytes")
        entry, views = span.entry, span_views(self._region, span)

        def job() -> Packed | None:
            from ec_connector.codecs.work import pack

            run = views[0] if len(views) == 1 else b"".join(views)
            return pack(effect.codec, run, entry.dtype, entry.shape)

        return job


class Unpacker:
    """Chunks that came packed."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._jobs: deque[tuple[Unpack, Future[Timed[Bytes]]]] = deque()

    def start(self, effect: Unpack) -> None:
        """Unpack a chunk; :meth:`next` hands it out."""
        chunk, data = effect.chunk, effect.data

        def job() -> Bytes:
            from ec_connector.codecs.work import unpack

            return unpack(
                chunk.codec, data, chunk.checksum, chunk.nbytes, effect.dtype, effect.shape
            )

        self._jobs.append((effect, self._workers.start(job)))

    def next(self) -> tuple[Unpack, Timed[memoryview] | str] | None:
        """The next chunk that is unpacked, or why it is not; None: there is none now."""
        while self._jobs and self._jobs[0][1].done():
            effect, future = self._jobs.popleft()
            if future.cancelled():
                continue
            try:
                done = future.result()
                return effect, Timed(done.value.data, done.seconds)
            except CodecError as error:
                return effect, str(error)
            except Exception as error:  # whatever a library raises at what a peer sent
                return effect, repr(error)
        return None

    def stop(self, xfer_id: int) -> None:
        """Nobody wants the chunks of this transfer any more."""
        for effect, future in self._jobs:
            if effect.xfer_id == xfer_id:
                future.cancel()


def _timed(job: Callable[[], T]) -> Timed[T]:
    began = time.perf_counter()
    value = job()
    return Timed(value, time.perf_counter() - began)


def codecs_here(wanted: Sequence[str]) -> tuple[str, ...]:
    """The codecs of the setting that work here; those that lack their library are named once.

    Raises:
        ConfigError: none of them works.
    """
    usable = usable_codecs(wanted)
    for name, remedy in lacking(wanted).items():
        logger.warning("codec %s is not used, its library is not installed: %s", name, remedy)
    if loss_of(usable) != EXACT:
        logger.warning("rows may travel as %s: what arrives is near, not equal", loss_of(usable))
    return usable


def with_loss(identity: Identity, codecs: Sequence[str]) -> Identity:
    """The identity, and what rows lose with these codecs where they do.

    Raises:
        ConfigError: the identity has no room for it, or says otherwise.
    """
    loss = loss_of(codecs)
    if identity.factors.get(LOSS, loss) != loss:
        raise ConfigError(
            f"factor {LOSS}={identity.factors[LOSS]!r} contradicts codecs={list(codecs)}; "
            f"leave the factor out, it is set from codecs"
        )
    if loss == EXACT:
        return identity
    return Identity(identity.compatibility_hash, usable_factors(identity.factors | {LOSS: loss}))
