# SPDX-License-Identifier: Apache-2.0
"""What tests of real engines look at from outside: processes, their CPU time, counts by reason."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from ec_connector.client import AgentClient
from ec_connector.demo.servers import Server
from ec_connector.errors import AgentLostError
from ec_connector.protocol.local import AskStats, Stats

TICKS = os.sysconf("SC_CLK_TCK")
_LABELLED = r'^{name}_total\{{[^}}]*reason="([a-z_]+)"[^}}]*\}} ([0-9.eE+-]+)$'


def eventually(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it becomes true within so many seconds."""
    until = time.monotonic() + seconds
    while not (now := true()) and time.monotonic() < until:
        time.sleep(0.02)
    return now


def by_reason(url: str, name: str) -> dict[str, int]:
    """A counter of ours by its reasons, without those at 0."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    pattern = re.compile(_LABELLED.format(name=f"vllm:ec_pool_{name}"), re.MULTILINE)
    counts = {reason: int(float(value)) for reason, value in pattern.findall(text)}
    return {reason: count for reason, count in counts.items() if count}


def payload_received(url: str) -> float:
    """Payload bytes that an engine's agent received, by its books."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    found = re.findall(r'transferred_bytes_total\{[^}]*part="payload_in"[^}]*\} (\S+)', text)
    return sum(map(float, found))


def agents(server: Server) -> list[int]:
    """Process ids of a server's agents."""
    return [pid for pid, words in server.processes().items() if "ec_connector.agent" in words]


def agent_stats(server: Server) -> dict[str, int]:
    """The counts of a server's agent, from itself."""
    (pid,) = agents(server)
    names = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    for name in sorted(name for name in names if name.startswith("@ec-connector-")):
        with AgentClient(f"ipc://{name}", "client") as client:
            try:
                found = client.hello(5.0).agent_pid
            except AgentLostError:
                continue  # somebody else's, which has ended since
            if found == pid:
                client.send(AskStats())
                return next(m for m in client.receive(5.0) if isinstance(m, Stats)).values
    raise LookupError(f"agent {pid} of {server.name} is not reached")


def engine_processes(server: Server) -> list[int]:
    """All processes of a server but its agents, the API server first."""
    ours = set(agents(server))
    return sorted(set(server.processes()) - ours, key=lambda pid: pid != server.pid)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def title(pid: int) -> str:
    """A process' name as it calls itself."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()


def post(url: str) -> None:
    """Send an empty POST and expect success. Raises OSError."""
    request = urllib.request.Request(url, b"", method="POST")
    urllib.request.urlopen(request, timeout=30.0).close()
