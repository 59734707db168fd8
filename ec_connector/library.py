# SPDX-License-Identifier: Apache-2.0
"""Producer and Consumer: the same machinery without vLLM, for numpy arrays.

Example:
    >>> import numpy as np
    >>> from ec_connector import Consumer, Producer
    >>> rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    >>> with Producer(pool_size="16MiB") as producer, Consumer(pool_size="16MiB") as consumer:
    ...     announcement = producer.put("an image", rows)
    ...     again = consumer.fetch("an image", announcement, timeout=5.0)
    >>> bool((again == rows).all())
    True
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from ec_connector.agent.link import EngineLink, LinkDown, LinkUp
from ec_connector.announcement import key_fault, read_announcement
from ec_connector.arrays import array_of, bytes_of
from ec_connector.config import Settings
from ec_connector.dtypes import DTypeError, nbytes_of
from ec_connector.errors import (
    AgentDownError,
    AgentLostError,
    ConfigError,
    DeadlineError,
    MismatchError,
    PoolError,
    RegionError,
    fetch_error,
)
from ec_connector.pool.region import Region
from ec_connector.protocol.fingerprint import Identity, usable_factors
from ec_connector.protocol.local import (
    AskStats,
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
    ToClient,
)
from ec_connector.ticket_file import load_tickets

ANSWER_SECONDS = 5.0
"""An agent answers in well under a millisecond; one that takes this long is stuck."""
GRACE_SECONDS = 0.5
"""How much later than the agent a client gives up on its own."""
LONGEST_FETCH = 86400.0


class _Member:
    """What Producer and Consumer share: an agent, its region, one call at a time."""

    def __init__(
        self, factors: Mapping[str, object] | None, settings: Mapping[str, Any], serves: str
    ) -> None:
        self.settings = Settings.parse(settings)
        self._tickets = load_tickets(self.settings.ticket_key)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._asked = 0
        identity = Identity(factors=usable_factors(factors or {}))
        self._link = EngineLink(self.settings, identity, "client", serves=(serves,))
        self._welcome = self._link.start()
        try:
            self._region = Region.open(self._welcome.region, writable=True)
        except RegionError:
            self._link.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that this side's agent serves peers on."""
        return self._welcome.peer_host, self._welcome.peer_port

    @property
    def agent_pid(self) -> int:
        """Process id of the agent; 0 while there is none."""
        return self._link.agent_pid

    def stats(self) -> dict[str, Any]:
        """What this side's agent has counted since its start, and how things stand, by name.

        Raises:
            AgentLostError: the agent died or does not answer.
        """
        with self._turn():
            self._asked += 1
            seq = self._asked

            def to_me(answer: ToClient) -> bool:
                return isinstance(answer, Stats) and answer.seq == seq

            answer = self._answer(to_me, ANSWER_SECONDS) if self._link.send(AskStats(seq)) else None
            if not isinstance(answer, Stats):
                raise AgentLostError(f"the agent did not answer within {ANSWER_SECONDS:g} s")
            return answer.values

    def close(self) -> None:
        """End the agent, if this object started it; calls under way fail. Idempotent.

        In a process that was forked off this does nothing: the agent is its parent's.
        """
        if os.getpid() != self._pid:
            return
        self._closed = True
        with self._lock:
            self._link.close()
            self._region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _turn(self, patience: float = -1.0) -> Iterator[None]:
        """One call at a time; ``patience`` seconds to wait for others, -1: as long as it takes.

        Raises:
            AgentLostError: closed, of another process, or the agent is down.
            DeadlineError: other calls took all the time.
        """
        # First: a lock that a thread of the parent held at a fork is never released here.
        if os.getpid() != self._pid:
            raise AgentLostError(
                f"made in process {self._pid}, used in {os.getpid()}: a connection does not "
                "outlive a fork; make one in each process"
            )
        if not self._lock.acquire(timeout=patience):
            raise DeadlineError(f"other calls of this object took all of {patience:g} s")
        try:
            self._attach()
            yield
        finally:
            self._lock.release()

    def _attach(self) -> None:
        """Follow the agent if it was started anew since the last call."""
        if self._closed:
            raise AgentLostError(f"this {type(self).__name__} is closed")
        self._link.poll()
        welcome = self._link.welcome
        if welcome is None or not self._link.up:
            raise AgentLostError("the agent is down; another is being started")
        # Not by the event that told of it: another call may have taken that one.
        if welcome != self._welcome:
            try:
                region = Region.open(welcome.region, writable=True)
            except RegionError as error:
                raise AgentLostError(f"the new agent was lost at once: {error}") from error
            self._region.close()
            self._welcome, self._region = welcome, region

    def _answer(self, wanted: Callable[[ToClient], bool], timeout: float) -> ToClient | None:
        """The first message that ``wanted`` takes; None when the time is over."""
        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0:
            # Short waits only where the agent's end, or ours, would otherwise go unnoticed.
            if self._closed:
                raise AgentLostError(f"this {type(self).__name__} was closed meanwhile")
            for event in self._link.wait(min(left, 0.25)):
                if isinstance(event, LinkDown | LinkUp):
                    raise AgentLostError(f"the agent was lost: {event}")
                if wanted(event):
                    return event
        return None


class Producer(_Member):
    """Puts arrays into a pool and serves them to consumers.

    Args:
        factors: what this encoder is, by name (``{"model": ..., "weights": ...}``), JSON
            values. A consumer that knows one of them otherwise is refused.
        settings: the configuration keys (``pool_size``, ``bind_host``, ``port`` ...).

    Raises:
        ConfigError, AgentStartError, RegionError: see :mod:`ec_connector.errors`.
    """

    def __init__(self, *, factors: Mapping[str, object] | None = None, **settings: Any) -> None:
        super().__init__(factors, settings, "encode")
        self._calls = 0

    def put(
        self, key: str, array: np.ndarray[Any, Any], dtype: str = "", *, modality: str = "image"
    ) -> dict[str, Any]:
        """Put an array under ``key`` and return its announcement, a dict of JSON values.

        The array may have any shape and need not be contiguous; it is copied once.
        ``dtype`` names what numpy lacks: an array of ``uint16`` with
        ``dtype="bfloat16"``. A key that is held already gets the new bytes.

        Raises:
            PoolError: no room for it now, or ever, or a key that cannot be announced.
            AgentLostError: the agent died or does not answer.
            DTypeError: an element type or a number of axes that cannot be carried.
        """
        if fault := key_fault(key):
            raise PoolError(fault)
        try:
            array = np.asanyarray(array)
        except ValueError as error:
            raise DTypeError(f"{type(array).__name__} is no array: {error}") from error
        room = self._region.num_blocks * self._region.block_bytes
        if array.nbytes > room:  # known before a copy is made of what is not contiguous
            raise PoolError(f"{key!r} of {array.nbytes} bytes: the whole pool has {room}")
        name, raw = bytes_of(array, dtype)
        item = ReserveItem(str(key), raw.nbytes, name, list(array.shape))
        with self._turn():
            place = self._reserve(item)
            self._save(place, raw)
            return self._announcement(item, modality)

    def held(
        self, key: str, shape: Sequence[int], dtype: str, *, modality: str = "image"
    ) -> dict[str, Any] | None:
        """The announcement of an item that is in the pool already, or None.

        Counts as a use of it. ``shape`` and ``dtype`` (torch's name) are what it was put as;
        of another shape or type it is not the same item.

        Raises:
            AgentLostError: the agent died or does not answer.
            DTypeError: a type or shape that cannot be carried.
        """
        if key_fault(key):
            return None
        item = ReserveItem(str(key), nbytes_of(shape, dtype), dtype, list(shape))
        with self._turn():
            try:
                place = self._reserve(item, replace=False)
            except PoolError:
                return None
            if place.held:
                return self._announcement(item, modality)
            # Room was made instead: given back at once, nobody was told of it.
            self._link.send(SaveFailed(key, place.generation, "it was only asked for"))
            return None

    def _announcement(self, item: ReserveItem, modality: str) -> dict[str, Any]:
        host, port = self.address
        signed = {}
        if self._tickets is not None:
            ticket = self._tickets.sign(item.key, host, port, item.nbytes, item.dtype, item.shape)
            signed = {"ticket": ticket}
        return {
            "item_indices": [0],
            "metadata": {},
            "modality": modality,
            "peer_host": host,
            "peer_port": port,
            "size_bytes": item.nbytes,
            "shape": item.shape,
            "dtype": item.dtype,
            **signed,
        }

    def _save(self, place: ReservedItem, raw: np.ndarray[Any, Any]) -> None:
        """Write the bytes where they belong, and have them served."""
        source = memoryview(raw.data)
        for view in self._region.views(place.extents, raw.nbytes):
            view[:] = source[: len(view)]
            source = source[len(view) :]
        if not self._link.send(Saved([(place.key, place.generation)])):
            raise AgentLostError("the agent was lost during a put")

    def _reserve(self, item: ReserveItem, *, replace: bool = True) -> ReservedItem:
        self._calls += 1
        message = Reserve(self._calls, self._calls, [item], replace=replace)

        def to_me(answer: ToClient) -> bool:
            return isinstance(answer, Reserved) and answer.seq == message.seq

        answer = self._answer(to_me, ANSWER_SECONDS) if self._link.send(message) else None
        if not isinstance(answer, Reserved):
            raise AgentLostError(f"the agent did not answer within {ANSWER_SECONDS:g} s")
        place = answer.items[0]
        if place.refused:
            raise PoolError(place.refused)
        return place


class Consumer(_Member):
    """Fetches arrays that producers announced.

    Args:
        factors: what is expected of producers, by name; see :class:`Producer`.
        settings: the configuration keys (``pool_size``, ``fetch_timeout``, ``planes`` ...).
    """

    def __init__(self, *, factors: Mapping[str, object] | None = None, **settings: Any) -> None:
        super().__init__(factors, settings, "decode")

    def fetch(
        self, key: str, announcement: Mapping[str, Any], timeout: float | None = None
    ) -> np.ndarray[Any, Any]:
        """The announced array: same dtype, shape and bytes, writable, the caller's own.

        What numpy lacks comes as the unsigned integers that it was put as; the
        announcement's ``dtype`` says what they are. ``timeout`` is in seconds,
        ``fetch_timeout`` of the settings by default.

        Raises:
            FetchError: the subclass says why it cannot be had.
            ConfigError: ``timeout`` is no number of seconds up to a day.
        """
        seconds: Any = self.settings.fetch_timeout if timeout is None else timeout
        if not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_FETCH:
            raise ConfigError(f"timeout={seconds!r}: give seconds from 0 to {LONGEST_FETCH:g}")
        until = time.monotonic() + seconds
        item = read_announcement(key, announcement, seconds)
        try:
            with self._turn(seconds):
                left = max(0.0, until - time.monotonic())
                item.timeout_ms = max(1, int(left * 1000))
                ready = self._ask(item, left)
                try:
                    return self._copy(ready)
                finally:
                    self._link.send(Release([item.key]))
        except AgentLostError as error:
            raise AgentDownError(str(error)) from error

    def _ask(self, item: FetchItem, seconds: float) -> Ready:
        def to_me(answer: ToClient) -> bool:
            if isinstance(answer, Ready):
                # Not what an earlier call of that key asked for, which came too late for it.
                what = (answer.nbytes, answer.dtype, answer.shape)
                asked = (item.nbytes, item.dtype, item.shape)
                # Without a producer's address: whatever the pool holds under that key.
                return answer.key == item.key and (what == asked or not item.peer_host)
            return isinstance(answer, Failed) and answer.key == item.key

        if not self._link.send(Fetch([item])):
            raise AgentLostError("the agent is down; another is being started")
        answer = self._answer(to_me, seconds + GRACE_SECONDS)
        if isinstance(answer, Ready):
            return answer
        if isinstance(answer, Failed):
            text = f"{item.key!r} from {answer.peer or 'the pool'}: {answer.message}"
            raise fetch_error(answer.reason, text, answer.factor)
        self._link.send(Release([item.key]))
        raise DeadlineError(f"this side's agent did not answer within {seconds:g} s")

    def _copy(self, ready: Ready) -> np.ndarray[Any, Any]:
        raw = np.empty(ready.nbytes, np.uint8)
        offset = 0
        for view in self._region.views(ready.extents, ready.nbytes):
            raw[offset : offset + len(view)] = view
            offset += len(view)
        if self._region.generation(ready.extents[0][0]) != ready.generation:
            raise MismatchError(f"{ready.key!r} was overwritten while it was read")
        try:
            return array_of(raw, ready.dtype, ready.shape)
        except DTypeError as error:
            raise MismatchError(f"{ready.key!r} is no array: {error}") from error
