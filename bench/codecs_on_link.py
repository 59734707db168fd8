# SPDX-License-Identifier: Apache-2.0
"""Fetches of packed rows over links of known rates: ``sudo python bench/codecs_on_link.py``.

Two network namespaces joined by a cable, as in ``two_hosts.py``, whose needs are the same. Items
of 4.7 MB: normal rows of bfloat16, 4096 wide, each another one. A time is that of
``Consumer.fetch``, the copy out of the pool included.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import numpy as np
from two_hosts import HOSTS, A, B, cable, run

from ec_connector import Consumer, Producer
from ec_connector.bench.children import Child, serve_parent
from ec_connector.bench.stats import median

CODECS = ("none", "zstd", "lz4", "lossy-int8-rows")
RATES = ("10gbit", "2gbit", "1gbit", "500mbit", "100mbit")
SHAPE = (576, 4096)
ITEMS = 8
POOL = {"pool_size": "128MiB", "planes": ["zmq"], "lanes": 1}


def rows(number: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """An item."""
    values = np.random.default_rng(number).standard_normal(SHAPE, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def produce() -> None:
    """In a child: a producer for each question, with the codec that it names."""
    producer: Producer | None = None
    for codec, answer in serve_parent():
        if producer is not None:
            producer.close()
        producer = Producer(**POOL, bind_host=HOSTS[A], codecs=[codec])
        answer([producer.put(f"{n}", rows(n), "bfloat16") for n in range(ITEMS)])


def consume() -> None:
    """In a child: seconds of each fetch, the first one left out."""
    for (codec, announced), answer in serve_parent():
        seconds = []
        with Consumer(**POOL, allow_peers=["10.99.0.0/24"], codecs=[codec]) as consumer:
            for number, item in enumerate(announced):
                begin = time.perf_counter()
                came = consumer.fetch(f"{number}", item, timeout=60.0)
                seconds.append(time.perf_counter() - begin)
                if codec != "lossy-int8-rows" and (came != rows(number)).any():
                    raise AssertionError(f"{codec} changed rows")
        answer(seconds[1:])


def main() -> int:
    """Every rate and codec; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    here = {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    on = {name: ("ip", "netns", "exec", name) for name in HOSTS}
    with (
        cable(),
        Child("codecs_on_link", ["produce"], prefix=on[A], env=here) as there,
        Child("codecs_on_link", ["consume"], prefix=on[B], env=here) as back,
    ):
        for rate in RATES:
            for name in HOSTS:
                tbf = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                run("tc", "-n", name, "qdisc", "replace", "dev", "ec0", "root", *tbf)
            for codec in CODECS:
                announced = there.ask(codec, 60.0)
                took = median(back.ask([codec, announced], 120.0))
                found = {"rate": rate, "codec": codec, "median_ms": round(1e3 * took, 2)}
                if options.json:
                    print(json.dumps(found), flush=True)
                else:
                    print(f"{rate:>8} {codec:>16}: {1e3 * took:.1f} ms", flush=True)
    return 0


if __name__ == "__main__":
    parts = {"produce": produce, "consume": consume}
    if sys.argv[1:2] and sys.argv[1] in parts:
        parts[sys.argv[1]]()
    else:
        sys.exit(main())
