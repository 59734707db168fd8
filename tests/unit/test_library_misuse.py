# SPDX-License-Identifier: Apache-2.0
"""Producer and Consumer in the wrong hands: a sentence each time, and no call that never ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ec_connector import Consumer, Producer
from ec_connector.dtypes import DTypeError
from ec_connector.errors import (
    AgentDownError,
    AgentLostError,
    ConfigError,
    DeadlineError,
    ECConnectorError,
    FetchError,
    MismatchError,
    PoolError,
)
from ec_connector.testing import FakeProducer

SMALL: dict[str, Any] = {"pool_size": "8MiB"}
ROWS = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(scope="module")
def producer() -> Iterator[FakeProducer]:
    """One producer for all that leaves it in order."""
    with FakeProducer(**SMALL) as producer:
        yield producer


@pytest.fixture(scope="module")
def consumer() -> Iterator[Consumer]:
    """The same for a consumer."""
    with Consumer(**SMALL) as consumer:
        yield consumer


def test_what_numpy_makes_arrays_of(producer: FakeProducer, consumer: Consumer) -> None:
    """Lists and numbers are put as the arrays that numpy makes of them."""
    for name, value in (("list", [[1, 2], [3, 4]]), ("number", 3.5)):
        announcement = Producer.put(producer, name, value)  # type: ignore[arg-type]
        assert (consumer.fetch(name, announcement) == np.asarray(value)).all()


BAD_ARRAYS: list[tuple[Any, Any, str]] = [
    (np.zeros((1,) * 9), "", "9 axes"),
    (np.ma.array([1, 2], mask=[False, True]), "", "masked"),
    ([[1], [1, 2]], "", "no array"),
    ({}, "", "cannot be carried"),
    (ROWS, 5, "no name"),
    (ROWS, "x" * 100_000, "cannot be carried"),
]


@pytest.mark.parametrize(("array", "dtype", "why"), BAD_ARRAYS, ids=[w for _, _, w in BAD_ARRAYS])
def test_arrays_that_are_none(array: Any, dtype: Any, why: str, producer: FakeProducer) -> None:
    """A short sentence says what cannot be carried."""
    with pytest.raises(DTypeError, match=why) as caught:
        Producer.put(producer, "bad", array, dtype)
    assert len(str(caught.value)) < 400


def test_larger_than_the_pool_is_known_before_a_copy(producer: FakeProducer) -> None:
    """A petabyte that is a view of one byte is refused, not copied."""
    with pytest.raises(PoolError, match="the whole pool has"):
        Producer.put(producer, "huge", np.broadcast_to(np.uint8(1), (1 << 50,)))


BAD_KEYS: list[tuple[Any, str]] = [
    (b"abc", "bytes; give text"),
    (5, "int; give text"),
    (None, "NoneType; give text"),
    ("k" * 10_000_000, "over 512 characters"),
    ("\ud800", "half of a character"),
]


@pytest.mark.parametrize(("key", "why"), BAD_KEYS, ids=[why for _, why in BAD_KEYS])
def test_keys_that_are_none(key: Any, why: str, producer: FakeProducer, consumer: Consumer) -> None:
    """On both sides, and never at the length of the key."""
    announcement = Producer.put(producer, "good", ROWS)
    for call in (
        lambda: Producer.put(producer, key, ROWS),
        lambda: consumer.fetch(key, announcement),
    ):
        with pytest.raises((PoolError, MismatchError), match=why) as caught:
            call()
        assert len(str(caught.value)) < 300


def test_text_that_is_more_than_text(producer: FakeProducer, consumer: Consumer) -> None:
    """A subclass of str is a key like its text."""

    class Name(str):
        __slots__ = ()

    announcement = Producer.put(producer, Name("named"), ROWS)
    assert (consumer.fetch(Name("named"), announcement) == ROWS).all()


BAD_FIELDS: list[tuple[str, Any]] = [
    ("peer_host", 5),
    ("peer_host", "127.0.0.1\nERROR forged"),
    ("peer_host", "a" * 10_000),
    ("peer_host", "\ud800"),
    ("peer_port", 1.5),
    ("peer_port", 0),
    ("peer_port", 10**30),
    ("peer_port", float("nan")),
    ("size_bytes", -1),
    ("size_bytes", None),
    ("size_bytes", 1 << 64),
    ("shape", None),
    ("shape", ["x"]),
    ("shape", [1] * 9),
    ("shape", [-4, -6]),
    ("dtype", None),
    ("dtype", "x" * 1_000_000),
    ("ticket", 5),
    ("ticket", "x" * 65),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_announcements_are_told_by_field(
    field: str, value: Any, producer: FakeProducer, consumer: Consumer
) -> None:
    """A wrong value, or none: the error names the field and is short; nothing is dialled."""
    announcement = Producer.put(producer, "edited", ROWS)
    with pytest.raises(MismatchError, match=rf"\$\.{field}|surrogates") as caught:
        consumer.fetch("edited", {**announcement, field: value})
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("announcement", [None, 5, "text", [], b"x"])
def test_announcements_that_are_none(announcement: Any, consumer: Consumer) -> None:
    """What is no mapping at all is said to be none."""
    with pytest.raises(MismatchError, match="give the dict that put returned"):
        consumer.fetch("key", announcement)


@pytest.mark.parametrize("timeout", ["5", "5s", [], -1, float("nan"), float("inf")])
def test_timeouts_that_are_none(timeout: Any, producer: FakeProducer, consumer: Consumer) -> None:
    """Whatever is no number of seconds is named."""
    announcement = Producer.put(producer, "timed", ROWS)
    with pytest.raises(ConfigError, match="timeout="):
        consumer.fetch("timed", announcement, timeout=timeout)


@pytest.mark.parametrize("factors", [5, {1: 2}, [("a", 1)]])
def test_factors_that_are_none(factors: Any) -> None:
    """Factors are a mapping from names."""
    with pytest.raises(ConfigError, match="factor"):
        Producer(factors=factors, **SMALL)


# ── several threads, several processes, after the end ────────────────────────


def test_a_call_waits_for_others_no_longer_than_it_may(producer: FakeProducer) -> None:
    """A timeout counts from the call, also where another thread's fetch goes first."""
    there = Producer.put(producer, "there", ROWS)
    late = producer.announce("late", ROWS)
    with Consumer(**SMALL) as consumer:
        asked = threading.Event()

        def fetch_late() -> None:
            asked.set()
            consumer.fetch("late", late, timeout=30.0)

        thread = threading.Thread(target=fetch_late)
        thread.start()
        asked.wait()
        time.sleep(0.2)
        with pytest.raises(DeadlineError, match="other calls"):
            consumer.fetch("there", there, timeout=0.3)
        producer.land("late")
        thread.join()
        assert (consumer.fetch("there", there, timeout=5.0) == ROWS).all()


def test_close_ends_a_call_under_way(producer: FakeProducer) -> None:
    """Closed by another thread, a fetch that waits fails instead of holding the close up."""
    never = producer.announce("never", ROWS)
    consumer = Consumer(**SMALL)
    caught: list[BaseException] = []

    def fetch() -> None:
        try:
            consumer.fetch("never", never, timeout=600.0)
        except FetchError as error:
            caught.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    time.sleep(0.3)
    consumer.close()
    thread.join(10.0)
    assert not thread.is_alive()
    assert isinstance(caught[0], AgentDownError)
    producer.land("never")


def test_after_close() -> None:
    """Closed is what it is called, not down with another to come."""
    producer, consumer = Producer(**SMALL), Consumer(**SMALL)
    announcement = producer.put("key", ROWS)
    for member in (producer, consumer, producer, consumer):
        member.close()
    with pytest.raises(AgentLostError, match="Producer is closed"):
        producer.put("key", ROWS)
    with pytest.raises(AgentDownError, match="Consumer is closed"):
        consumer.fetch("key", announcement)


# The warning of later Pythons: locks that other threads hold. The child takes none.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_is_told_to_make_its_own(producer: FakeProducer) -> None:
    """The child's calls fail at once, its close ends nothing, and the parent goes on."""
    announcement = Producer.put(producer, "before the fork", ROWS)
    with Consumer(**SMALL) as consumer:
        pids = producer.agent_pid, consumer.agent_pid
        child = os.fork()
        if child == 0:  # no assertion here: what pytest prints must come from one process
            status = 1
            try:
                consumer.fetch("before the fork", announcement)
            except ECConnectorError as error:
                status = 0 if "make one in each process" in str(error) else 2
            consumer.close()
            producer.close()
            os._exit(status)
        assert _status_within(child, 20.0) == 0
        assert (consumer.fetch("before the fork", announcement, timeout=5.0) == ROWS).all()
        assert (producer.agent_pid, consumer.agent_pid) == pids


def _status_within(child: int, seconds: float) -> int:
    """The child's exit status; it is killed when it takes longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
