# SPDX-License-Identifier: Apache-2.0
"""Producer and Consumer with real agents, sockets and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ec_connector import Consumer, Producer
from ec_connector.errors import (
    ConfigError,
    DeadlineError,
    FetchError,
    IncompatibleError,
    ItemMissingError,
    MismatchError,
    PeerRefusedError,
    PeerUnreachableError,
    PoolError,
    RemoteSaveError,
)
from ec_connector.testing import FakeProducer

SMALL: dict[str, Any] = {"pool_size": "8MiB"}
PLANES = [["memory", "zmq"], ["zmq"]]


@pytest.fixture(scope="module")
def producer() -> Iterator[FakeProducer]:
    """One producer for all that leaves it in order."""
    with FakeProducer(**SMALL) as producer:
        yield producer


@pytest.fixture(scope="module", params=PLANES, ids=lambda planes: planes[0])
def consumer(request: pytest.FixtureRequest) -> Iterator[Consumer]:
    """A consumer for each plane."""
    with Consumer(planes=request.param, **SMALL) as consumer:
        yield consumer


ARRAYS = {
    "rows": np.arange(12, dtype=np.float32).reshape(3, 4),
    "0-d": np.array(7, np.int64),
    "empty": np.empty((0, 5), np.float16),
    "bool": np.array([True, False]),
    "big-endian": np.arange(5, dtype=">i4"),
    "columns": np.arange(60, dtype=np.float64).reshape(6, 10)[:, 2:7],
    "reversed": np.arange(9, dtype=np.int16)[::-1],
    "view of a batch": np.arange(64, dtype=np.uint8).reshape(2, 4, 8)[1],
    "several chunks": np.random.default_rng(0).integers(0, 255, 5_000_000, np.uint8),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_survive(name: str, producer: FakeProducer, consumer: Consumer) -> None:
    """Same element type (whatever its byte order), shape and values, through JSON and back."""
    array = ARRAYS[name]
    announcement = json.loads(json.dumps(producer.put(name, array)))
    again = consumer.fetch(name, announcement, timeout=10.0)
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    assert again.tobytes() == array.tobytes()
    assert again.flags.writeable


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8)])
def test_what_numpy_lacks(
    dtype: str, width: type, producer: FakeProducer, consumer: Consumer
) -> None:
    """Raw rows keep their name and their bits."""
    array = np.arange(24, dtype=width).reshape(4, 6)
    announcement = producer.put(dtype, array, dtype)
    assert announcement["dtype"] == dtype
    again = consumer.fetch(dtype, announcement)
    assert again.dtype == array.dtype
    assert (again == array).all()


def test_a_key_gets_new_bytes(producer: FakeProducer, consumer: Consumer) -> None:
    """The later content of another size is what is fetched."""
    for size in (10, 20):
        array = np.full(size, size, np.int32)
        assert (consumer.fetch("same", producer.put("same", array)) == array).all()


def test_fetched_before_it_is_saved(producer: FakeProducer, consumer: Consumer) -> None:
    """The consumer waits at the producer and is answered by the save."""
    rows = np.ones((4, 4), np.float32)
    announcement = producer.announce("late", rows)
    timer = threading.Timer(0.2, producer.land, ["late"])
    timer.start()
    assert (consumer.fetch("late", announcement, timeout=10.0) == rows).all()
    timer.join()
    producer.put("late", rows[:2])


def test_failed_save(producer: FakeProducer, consumer: Consumer) -> None:
    """The producer's words and traceback are in the exception."""
    announcement = producer.announce("broken", np.ones(4, np.float32))
    producer.fail("broken", "no memory", "Traceback: RuntimeError")
    # As a rule told before anybody asked: then it is simply not there.
    with pytest.raises((ItemMissingError, RemoteSaveError)):
        consumer.fetch("broken", announcement)
    announcement = producer.announce("broken", np.ones(4, np.float32))
    timer = threading.Timer(0.2, producer.fail, ["broken", "no memory", "Traceback: RuntimeError"])
    timer.start()
    with pytest.raises(RemoteSaveError, match=r"(?s)no memory.*RuntimeError"):
        consumer.fetch("broken", announcement, timeout=10.0)
    timer.join()


def test_deadline(producer: FakeProducer, consumer: Consumer) -> None:
    """Not later than asked for, and the item can be had afterwards."""
    rows = np.ones(8, np.float32)
    announcement = producer.announce("slow", rows)
    begun = time.monotonic()
    with pytest.raises(DeadlineError):
        consumer.fetch("slow", announcement, timeout=0.3)
    assert time.monotonic() - begun < 5.0
    producer.land("slow")
    assert (consumer.fetch("slow", announcement) == rows).all()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"peer_host": ""}, ItemMissingError),
        ({"peer_host": "169.254.169.254"}, PeerRefusedError),
        ({"peer_host": "10.1.2.3"}, PeerRefusedError),
        ({"peer_host": "0.0.0.0"}, PeerRefusedError),
        ({"peer_host": "no.such.host.invalid"}, PeerRefusedError),
        ({"peer_host": "bro\ud800ken"}, MismatchError),
        ({"peer_port": 1}, PeerUnreachableError),
        ({"peer_port": 0}, FetchError),
        ({"peer_port": 70_000}, FetchError),
        ({"peer_port": "x"}, MismatchError),
        ({"size_bytes": 7}, MismatchError),
        ({"size_bytes": -1}, MismatchError),
        ({"size_bytes": 2**70}, MismatchError),
        ({"size_bytes": float("inf")}, MismatchError),
        ({"size_bytes": None}, MismatchError),
        ({"shape": 4}, MismatchError),
        ({"shape": [float("nan")]}, MismatchError),
        ({"shape": [2**63, 0], "size_bytes": 0}, FetchError),
        ({"dtype": "bro\ud800ken"}, MismatchError),
        ({"shape": [5]}, MismatchError),
        ({"shape": [-4]}, MismatchError),
        ({"dtype": "int8"}, MismatchError),
        ({"dtype": "nonsense"}, FetchError),
    ],
)
def test_announcements_that_lie(
    change: dict[str, Any], error: type[Exception], producer: FakeProducer, consumer: Consumer
) -> None:
    """A clear error within the deadline, and the next fetch works."""
    rows = np.ones(4, np.float32)
    announcement = producer.put("honest", rows)
    with pytest.raises(error):
        consumer.fetch("other name" if "peer" in str(change) else "honest",
                       announcement | change, timeout=4.0)  # fmt: skip
    assert (consumer.fetch("honest", announcement) == rows).all()


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan"), 1e30])
def test_no_time_to_wait(timeout: float, producer: FakeProducer, consumer: Consumer) -> None:
    """The value is named, and nothing is asked."""
    announcement = producer.put("a", np.ones(4))
    with pytest.raises(ConfigError, match=rf"timeout={timeout!r}.*86400".replace("+", r"\+")):
        consumer.fetch("a", announcement, timeout=timeout)


@pytest.mark.parametrize("key", ["bro\ud800ken", "k" * 600, 5])
def test_keys_that_cannot_travel(key: Any, producer: FakeProducer, consumer: Consumer) -> None:
    """Said at once by either side."""
    begun = time.monotonic()
    with pytest.raises(PoolError, match="key"):
        producer.put(key, np.ones(4))
    with pytest.raises(FetchError):
        consumer.fetch(key, producer.put("a", np.ones(4)))
    assert time.monotonic() - begun < 4.0


def test_factors() -> None:
    """Any JSON value, however long; what no request could carry is refused by name."""
    long = {"model": "m" * 100_000, "layers": 12}
    with (
        Producer(factors=long, **SMALL) as producer,
        Consumer(factors=long, **SMALL) as consumer,
        Consumer(factors={"layers": 13}, **SMALL) as other,
    ):
        announcement = producer.put("a", np.ones(4))
        assert (consumer.fetch("a", announcement) == 1).all()
        with pytest.raises(IncompatibleError, match=r"layers differs: '12'.*'13'"):
            other.fetch("a", announcement)


def test_other_weights(producer: FakeProducer) -> None:
    """A factor that differs is named; one that only one side knows is not compared."""
    with (
        FakeProducer(factors={"weights": "new", "only": "here"}, **SMALL) as other,
        Consumer(factors={"weights": "old"}, **SMALL) as consumer,
    ):
        rows = np.ones(4, np.float32)
        with pytest.raises(IncompatibleError) as caught:
            consumer.fetch("a", other.put("a", rows))
        assert caught.value.factor == "weights"
        assert (consumer.fetch("b", producer.put("b", rows)) == rows).all()


def test_too_large_and_full() -> None:
    """An item that does not fit is refused, and the pool serves others as before."""
    with Producer(pool_size="1MiB") as producer, Consumer(pool_size="1MiB") as consumer:
        with pytest.raises(PoolError, match="whole pool"):
            producer.put("huge", np.zeros(2 * 1024 * 1024, np.uint8))
        # Ten times the capacity in distinct items: old ones make room.
        for number in range(40):
            rows = np.full(256 * 1024, number, np.uint8)
            announcement = producer.put(f"item-{number}", rows)
            assert (consumer.fetch(f"item-{number}", announcement) == number).all()
        with pytest.raises(FetchError):
            consumer.fetch("huge", announcement | {"size_bytes": 2**21, "shape": [2**21]})


def test_settings_are_checked() -> None:
    """As everywhere: the nearest right key is named."""
    with pytest.raises(ConfigError, match="pool_size"):
        Producer(poolsize="1MiB")


def test_many_threads() -> None:
    """One object may be used from several threads."""
    with Producer(**SMALL) as producer, Consumer(**SMALL) as consumer:
        wrong: list[int] = []

        def work(number: int) -> None:
            for turn in range(20):
                rows = np.full((number + 1, 100), turn, np.int32)
                key = f"{number}-{turn}"
                if not (consumer.fetch(key, producer.put(key, rows)) == rows).all():
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_in_another_process_without_torch_or_vllm() -> None:
    """Importing and using both loads neither; and the two can be different processes."""
    code = """
import json, sys
import numpy as np
from ec_connector import Consumer, Producer
with Producer(pool_size="8MiB") as producer, Consumer(pool_size="8MiB") as consumer:
    announcement = json.loads(sys.stdin.readline())
    assert (consumer.fetch("a", announcement) == np.arange(1000)).all()
    consumer.fetch("b", producer.put("b", np.ones(3)))
print(sorted({"torch", "vllm"} & sys.modules.keys()))
"""
    with Producer(**SMALL) as producer:
        announcement = json.dumps(producer.put("a", np.arange(1000)))
        ran = subprocess.run(
            [sys.executable, "-c", code],
            input=announcement + "\n",
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"


def test_held() -> None:
    """An item that is there is announced again; one that is not leaves no room taken."""
    with Producer(pool_size="1MiB") as producer:
        rows = np.ones((4, 4), np.float32)
        announced = producer.put("a", rows)
        assert producer.held("a", (4, 4), "float32") == announced
        free = producer.stats()["blocks_free"]
        assert producer.held("b", (4, 4), "float32") is None
        assert producer.held("half \ud800", (4, 4), "float32") is None
        assert producer.held("large", (1 << 20, 4), "float32") is None
        assert producer.stats()["blocks_free"] == free
        assert producer.held("a", (2, 8), "float32") is None  # of another shape it is another
        assert producer.stats()["blocks_free"] == free + 1
