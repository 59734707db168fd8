# SPDX-License-Identifier: Apache-2.0
"""What keys and tickets cost: ``python bench/security_cost.py``.

Fetches of new items over the zmq plane through ``Consumer.fetch`` (the copy out of the pool is
in it), plain and with CURVE in turn on the same machine, and the time of one ticket check.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ec_connector import Consumer, Producer
from ec_connector.bench.stats import Summary, summarize
from ec_connector.curve import make_keys
from ec_connector.protocol.tickets import Tickets

SIZES = {"0.13 MB": 131_072, "4.7 MB": 4_718_592}
ROUNDS, PER_ROUND = 8, 6
CHECKS = 20_000


def fetches(settings: dict[str, Any], nbytes: int) -> list[float]:
    """Seconds of each fetch by a fresh pair, the first one (which connects) left out."""
    data = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
    seconds = []
    common: dict[str, Any] = {"pool_size": "64MiB", "planes": ["zmq"], **settings}
    with Producer(**common) as producer, Consumer(**common) as consumer:
        for number in range(PER_ROUND + 1):
            announcement = producer.put(f"item {number}", data)
            begin = time.perf_counter()
            consumer.fetch(f"item {number}", announcement, timeout=10.0)
            seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def checks() -> float:
    """Ticket checks per second on one core, with two keys accepted."""
    tickets = Tickets([b"n" * 32, b"o" * 32])
    item = ("3b1f" * 16, "10.0.0.5", 15000, 4_718_592, "bfloat16", (576, 4096))
    ticket = tickets.sign(*item)
    begin = time.perf_counter()
    good = sum(tickets.verify(ticket, *item) for _ in range(CHECKS))
    if good != CHECKS:
        raise AssertionError("a good ticket was refused")
    return CHECKS / (time.perf_counter() - begin)


def told(name: str, kind: str, summary: Summary) -> str:
    """One line for the reader."""
    return (
        f"{name:>8} {kind:>6}: median {summary.median * 1e3:.2f} ms, "
        f"p25 {summary.p25 * 1e3:.2f}, p75 {summary.p75 * 1e3:.2f} (n={summary.n})"
    )


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        make_keys(Path(folder) / "keys")
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "curve": {"curve_keys": str(Path(folder) / "keys")},
        }
        for name, nbytes in SIZES.items():
            found: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(ROUNDS):
                for kind, settings in kinds.items():
                    found[kind] += fetches(settings, nbytes)
            for kind, seconds in found.items():
                print(told(name, kind, summarize(seconds)))
    print(f"ticket checks: {checks():,.0f} a second on one core")


if __name__ == "__main__":
    main()
