# SPDX-License-Identifier: Apache-2.0
"""Whether agents grow: many transfers of 1 MB, and the agents' own memory meanwhile.

    python bench/soak_memory.py [--items 10000]

Exit status 1 when an agent's memory grows by more than 8 MiB after the first 500 transfers.
The pool is shared memory and is not counted: it does not belong to the agent alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ec_connector.bench.ours import PLANES, Fetcher, filled, settings_for
from ec_connector.bench.plan import ONE
from ec_connector.library import Producer

SETTLED = 500
ALLOWED_KIB = 8 * 1024


def private_kib(pid: int) -> int:
    """KiB of memory that a process has for itself: anonymous pages, resident or swapped."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))


def soak(plane: str, items: int) -> bool:
    """Run one plane and print a line at every tenth; whether both agents stayed flat."""
    with (
        Producer(**settings_for(ONE, 64, {})) as producer,
        Fetcher(settings_for(ONE, 8, {}, PLANES[plane])) as fetcher,
    ):
        wanted = filled(producer, ONE, [f"item-{number}" for number in range(64)])
        agents = {"producer": producer.agent_pid, "consumer": fetcher.link.agent_pid}
        settled: dict[str, int] = {}
        for number in range(1, items + 1):
            fetcher.transfer(wanted[number % len(wanted)], plane)
            if number == SETTLED:
                settled = {name: private_kib(pid) for name, pid in agents.items()}
            if number % max(1, items // 10) == 0:
                now = {name: private_kib(pid) for name, pid in agents.items()}
                print(plane, number, *(f"{name} {kib} KiB" for name, kib in now.items()))
        grown = {name: private_kib(pid) - settled[name] for name, pid in agents.items()}
    print(plane, *(f"{name} grew by {kib} KiB" for name, kib in grown.items()))
    return max(grown.values()) <= ALLOWED_KIB


def main() -> int:
    """Both planes; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=10_000)
    options = parser.parse_args()
    if options.items <= SETTLED:
        parser.error(f"--items must be more than {SETTLED}")
    flat = [soak(plane, options.items) for plane in PLANES]
    return 0 if all(flat) else 1


if __name__ == "__main__":
    sys.exit(main())
