# SPDX-License-Identifier: Apache-2.0
"""Codecs between real agents: over real sockets, with libraries missing, with peers that die."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ec_connector import Consumer, Producer
from ec_connector.errors import AgentStartError, ConfigError, IncompatibleError
from ec_connector.protocol.local import Fetch, FetchItem
from ec_connector.testing import FakeProducer

pytest.importorskip("zstandard", reason="codec zstd; it is in the test extra")
pytest.importorskip("lz4.block", reason="codec lz4; it is in the test extra")

POOL = {"pool_size": "32MiB", "planes": ["zmq"]}
PATIENCE = 15.0


def bfloat16(count: int = 800, width: int = 1500, seed: int = 0) -> np.ndarray[Any, Any]:
    """Rows of floats, as numpy carries them."""
    values = np.random.default_rng(seed).standard_normal((count, width), np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def settled(member: Producer | Consumer) -> dict[str, int]:
    """The counters when nothing is pinned any more."""
    until = time.monotonic() + PATIENCE
    while (values := member.stats())["blocks_pinned"] or values.get("grants"):
        assert time.monotonic() < until, values
        time.sleep(0.02)
    return values


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("chunk_size", ["4KiB", "1MiB"])
def test_lossless(codec: str, chunk_size: str) -> None:
    """The same bytes, and fewer on the link."""
    rows = bfloat16() if chunk_size == "1MiB" else bfloat16(100)
    options: dict[str, Any] = {**POOL, "codecs": [codec, "none"], "chunk_size": chunk_size}
    with Producer(**options) as producer, Consumer(**options) as consumer:
        again = consumer.fetch("a", producer.put("a", rows, "bfloat16"), timeout=PATIENCE)
        assert (again == rows).all()
        there, here = settled(producer), settled(consumer)
    assert there["bytes_sent"] < 0.95 * rows.nbytes
    assert there["bytes_sent"] + there["bytes_saved_by_codecs"] == rows.nbytes
    as_it_is = rows.nbytes - here["unpacked_bytes"]
    assert here["packed_bytes_received"] + as_it_is == there["bytes_sent"]
    assert here["bytes_received"] == rows.nbytes


def test_many_at_a_time() -> None:
    """Small and large ones of several consumers, packed in turn, and each right."""
    options: dict[str, Any] = {**POOL, "codecs": ["zstd", "none"], "chunk_size": "64KiB"}
    items = {f"item {n}": bfloat16(20 * (n % 5 + 1), seed=n) for n in range(12)}
    with (
        Producer(**options) as producer,
        Consumer(**options) as one,
        Consumer(**options) as two,
    ):
        places = {key: producer.put(key, rows, "bfloat16") for key, rows in items.items()}
        for key, rows in items.items():
            for consumer in (one, two):
                assert (consumer.fetch(key, places[key], timeout=PATIENCE) == rows).all()
        settled(producer)


def test_lossy_where_both_say_so() -> None:
    """Near, and half the bytes."""
    rows = np.random.default_rng(3).standard_normal((200, 1000)).astype(np.float16)
    options: dict[str, Any] = {**POOL, "codecs": ["lossy-int8-rows"]}
    with Producer(**options) as producer, Consumer(**options) as consumer:
        again = consumer.fetch("a", producer.put("a", rows), timeout=PATIENCE)
        sent = settled(producer)["bytes_sent"]
    assert again.dtype == rows.dtype
    assert (again != rows).any()
    largest = np.abs(rows.astype(np.float32)).max(axis=1, keepdims=True)
    assert (np.abs(again.astype(np.float32) - rows) <= largest * (1 / 254 + 2**-10)).all()
    assert sent == 200 * 1004


@pytest.mark.parametrize("lossy_side", ["producer", "consumer"])
def test_lossy_where_one_says_so(lossy_side: str) -> None:
    """Refused, and the factor is named."""
    codecs = {"producer": ["none"], "consumer": ["none"]}
    codecs[lossy_side] = ["lossy-int8-rows", "none"]
    with (
        Producer(**POOL, codecs=codecs["producer"]) as producer,
        Consumer(**POOL, codecs=codecs["consumer"]) as consumer,
    ):
        announcement = producer.put("a", bfloat16(4), "bfloat16")
        with pytest.raises(IncompatibleError, match=r"loss differs.*lossy-int8-rows") as caught:
            consumer.fetch("a", announcement, timeout=PATIENCE)
        assert caught.value.factor == "loss"


@pytest.fixture
def no_zstd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Agents started from here on do not find the library of zstd."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['zstandard'] = None\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))


def test_producer_without_the_library(
    no_zstd: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows come as they are, and both sides say so once."""
    rows = bfloat16(100)
    codecs = ["zstd", "none"]
    with Producer(**POOL, codecs=codecs) as producer:
        monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])
        with Consumer(**POOL, codecs=codecs) as consumer:
            for key in "ab":
                announcement = producer.put(key, rows, "bfloat16")
                assert (consumer.fetch(key, announcement, timeout=PATIENCE) == rows).all()
            assert settled(producer)["bytes_sent"] == 2 * rows.nbytes
            assert consumer.stats()["codecs_declined"] == 2
    said = capfd.readouterr().err
    assert said.count("codec zstd is not used, its library is not installed") == 1
    assert said.count("has none of our codecs: it sends rows as they are") == 1


def test_producer_without_the_library_and_a_consumer_that_insists(
    no_zstd: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused with both lists."""
    with Producer(**POOL, codecs=["zstd", "none"]) as producer:
        monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])
        with Consumer(**POOL, codecs=["zstd"]) as consumer:
            announcement = producer.put("a", bfloat16(4), "bfloat16")
            with pytest.raises(IncompatibleError, match=r"no codec for bfloat16.*\['none'\]"):
                consumer.fetch("a", announcement, timeout=PATIENCE)


def test_no_codec_left(no_zstd: None) -> None:
    """The start says what to install."""
    with pytest.raises(AgentStartError, match=r"pip install 'ec-connector\[zstandard\]'"):
        Producer(**POOL, codecs=["zstd"])


def test_wrong_setting() -> None:
    """Refused before anything is started."""
    with pytest.raises(ConfigError, match=r"codecs=.*'gzip', which is unknown"):
        Producer(**POOL, codecs=["gzip"])


def test_consumer_killed_in_the_middle() -> None:
    """What is packed for it is dropped, and the producer's capacity comes back."""
    options: dict[str, Any] = {**POOL, "codecs": ["zstd"], "chunk_size": "4KiB"}
    with FakeProducer(**options, lease="500ms") as producer:
        for n in range(4):
            announcement = producer.put(f"item {n}", bfloat16(1000, seed=n), "bfloat16")
            with Consumer(**options) as consumer:
                item = FetchItem(
                    f"item {n}",
                    5000,
                    announcement["peer_host"],
                    announcement["peer_port"],
                    announcement["size_bytes"],
                    "bfloat16",
                    announcement["shape"],
                )
                consumer._link.send(Fetch([item]))
                time.sleep(0.02 * n)
        assert settled(producer)["blocks_pinned"] == 0
        with Consumer(**options) as consumer:
            rows = bfloat16(10)
            announcement = producer.put("last", rows, "bfloat16")
            assert (consumer.fetch("last", announcement, timeout=PATIENCE) == rows).all()
