# SPDX-License-Identifier: Apache-2.0
"""What one pool operation costs, at 100, 10 000 and 100 000 entries.

``python bench/pool_ops.py [--json]``. The pool is full and fragmented, items
have 1 to 20 blocks. Figures are medians over batches, in microseconds an
operation; they must not grow with the number of entries, so each line ends
with the ratio of the last figure to the first.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from ec_connector.pool.blocks import BlockPool, Entry

ENTRIES = (100, 10_000, 100_000)
BATCHES, BATCH = 200, 20
BLOCK = 65536
ITEM_BLOCKS = (1, 20)


class Stopwatch:
    """Microseconds an operation, by the operation's name."""

    def __init__(self) -> None:
        self.took: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def time(self, name: str, operations: int) -> Iterator[None]:
        """Time the body, which does so many operations."""
        begun = time.perf_counter()
        yield
        self.took[name].append((time.perf_counter() - begun) / operations * 1e6)


def reserve(pool: BlockPool, key: str, blocks: int) -> Entry:
    """Reserve one item."""
    nbytes = blocks * BLOCK
    return pool.reserve(key, nbytes, "bfloat16", (nbytes // 2,), owner=b"o", step=0, now=0.0)


def filled(entries: int, dice: random.Random) -> BlockPool:
    """A full pool of about so many READY items, fragmented by a round of evictions."""
    pool = BlockPool(entries * sum(ITEM_BLOCKS) // 2, BLOCK)
    for number in range(2 * entries):
        entry = reserve(pool, f"old{number}", dice.randint(*ITEM_BLOCKS))
        pool.commit(entry.key, entry.generation, 0.0)
    return pool


def measure(entries: int) -> dict[str, float]:
    """Median cost of each operation with about so many entries."""
    dice = random.Random(1)
    pool = filled(entries, dice)
    watch = Stopwatch()
    for batch in range(BATCHES):
        wanted = [(f"{batch}.{number}", dice.randint(*ITEM_BLOCKS)) for number in range(BATCH)]
        keys = [key for key, _ in wanted]
        with watch.time("reserve, evicting", BATCH):
            made = [reserve(pool, key, blocks) for key, blocks in wanted]
        with watch.time("commit", BATCH):
            for entry in made:
                pool.commit(entry.key, entry.generation, 0.0)
        with watch.time("get", BATCH):
            for key in keys:
                pool.get(key)
        with watch.time("touch", BATCH):
            for key in keys:
                pool.touch(key, 0.0)
        with watch.time("pin", BATCH):
            for key in keys:
                pool.pin(key, "s", 30.0 + batch, 0.0)
        with watch.time("renew a pin", BATCH):
            for key in keys:
                pool.pin(key, "s", 31.0 + batch, 0.0)
        with watch.time("unpin", BATCH):
            for entry in made:
                pool.unpin(entry.generation, "s", 0.0)
        for key in keys:
            pool.pin(key, "t", float(batch), 0.0)
        with watch.time("expire", BATCH):
            pool.expire(float(batch))
        with watch.time("drop", BATCH):
            for key in keys:
                pool.drop(key)
        with watch.time("reserve, fitting", BATCH):
            for key in keys:
                reserve(pool, key, 1)
        with watch.time("abandon", BATCH):
            pool.abandon_steps(b"o", 0)
        with watch.time("usage", 1):
            pool.usage()
        for key, blocks in wanted:  # full again for the next round
            pool.commit(key, reserve(pool, key, blocks).generation, 0.0)
    pool.validate()
    return {name: statistics.median(took) for name, took in watch.took.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Cost of pool operations by number of entries")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    as_json = parser.parse_args().json
    gc.disable()  # a full collection would be charged to the operation it happens in
    results = {entries: measure(entries) for entries in ENTRIES}
    if as_json:
        print(json.dumps(results))
        return
    head = "".join(f"{entries:>10}" for entries in ENTRIES)
    print(f"{'us an operation':20}{head}{'ratio':>8}")
    for name in results[ENTRIES[0]]:
        row = [results[entries][name] for entries in ENTRIES]
        figures = "".join(f"{one:10.2f}" for one in row)
        print(f"{name:20}{figures}{row[-1] / row[0]:8.2f}")


if __name__ == "__main__":
    main()
