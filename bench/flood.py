# SPDX-License-Identifier: Apache-2.0
"""What one peer's flood costs another: ``python bench/flood.py``.

A process sends a producer's agent requests as fast as the network takes them and reads no answer;
meanwhile a consumer fetches new items of 1 MB over the zmq plane. All on one machine, so the flood
also takes its own share of the processors.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event

import numpy as np
import zmq

from ec_connector import Consumer
from ec_connector.bench.stats import summarize
from ec_connector.protocol.messages import EC_CONNECTOR_VERSION, XferReq, encode
from ec_connector.testing import FakeProducer

FETCHES = 200
ROWS = np.zeros((256, 1024), np.float32)


def request(key: str, number: int, **more: object) -> bytes:
    """A request of the flood, each in a session of its own."""
    fields = {"connector_version": EC_CONNECTOR_VERSION, "xfer_id": number + 1, "planes": ["zmq"]}
    return encode(XferReq(key, "", f"session {number}", **fields, **more))  # type: ignore[arg-type] # fields by name


FLOODS: dict[str, Callable[[int], bytes]] = {
    "items that are not there": lambda n: request(f"absent {n}", n),
    "items to wait for": lambda n: request("to come", n, timeout_ms=60_000),
    "items that are there (pins)": lambda n: request("held", n, credit_bytes=4096),
}


def pour(port: int, kind: str, end: Event) -> None:
    """Send until told to stop."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        number = 0
        while not end.is_set():
            if socket.poll(100, zmq.POLLOUT):
                socket.send_multipart([b"", FLOODS[kind](number)])
                number += 1


def fetches(producer: FakeProducer, consumer: Consumer, name: str) -> list[float]:
    """Seconds of each fetch."""
    seconds = []
    for number in range(FETCHES):
        announcement = producer.put(f"{name} {number}", ROWS)
        begun = time.perf_counter()
        consumer.fetch(f"{name} {number}", announcement, timeout=10.0)
        seconds.append(time.perf_counter() - begun)
    return seconds


def main() -> None:
    """Print a line for each flood, and one without any."""
    settings = {"pool_size": "256MiB"}
    with (
        FakeProducer(**settings) as producer,
        Consumer(planes=["zmq"], **settings) as consumer,
    ):
        producer.put("held", ROWS)
        producer.announce("to come", ROWS)
        fetches(producer, consumer, "warm")
        port = producer.address[1]
        for kind in (None, *FLOODS):
            end = multiprocessing.Event()
            flood = multiprocessing.Process(target=pour, args=(port, kind or "", end))
            before = producer.stats()["requests"]
            if kind is not None:
                flood.start()
                time.sleep(0.5)
            begun = time.perf_counter()
            found = summarize(fetches(producer, consumer, kind or "quiet"))
            rate = (producer.stats()["requests"] - before) / (time.perf_counter() - begun)
            if kind is not None:
                end.set()
                flood.join()
            print(
                f"{kind or 'no flood'}: median {found.median * 1e3:.2f} ms, "
                f"p99 {found.p99 * 1e3:.1f} ms, {rate:,.0f} requests a second at the producer"
            )


if __name__ == "__main__":
    main()
