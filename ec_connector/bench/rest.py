# SPDX-License-Identifier: Apache-2.0
"""What nothing costs: agents of a connected pair that are asked for nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ec_connector.bench.ours import Fetcher, filled, settings_for
from ec_connector.bench.plan import SMALL
from ec_connector.bench.results import MEMORY
from ec_connector.library import Producer

_TICKS = os.sysconf("SC_CLK_TCK")


class Rest(NamedTuple):
    """Shares of a core, and how often a thread of either agent woke up in a second."""

    producer: float
    consumer: float
    wakeups: float


def rest(seconds: float, extra: Mapping[str, Any]) -> Rest:
    """Let a pair that has just moved an item rest for so many seconds."""
    with (
        Producer(**settings_for(SMALL, 4, extra)) as producer,
        Fetcher(settings_for(SMALL, 4, extra)) as fetcher,
    ):
        (item,) = filled(producer, SMALL, ["item"])
        fetcher.transfer(item, MEMORY)
        time.sleep(0.5)
        pids = (producer.agent_pid, fetcher.link.agent_pid)
        before = [(_cpu(pid), _switches(pid)) for pid in pids]
        time.sleep(seconds)
        after = [(_cpu(pid), _switches(pid)) for pid in pids]
    used = [(now[0] - then[0]) / seconds for then, now in zip(before, after, strict=True)]
    woke = sum(now[1] - then[1] for then, now in zip(before, after, strict=True))
    return Rest(used[0], used[1], woke / seconds)


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _switches(pid: int) -> int:
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                count += int(line.split()[1])
    return count
