# SPDX-License-Identifier: Apache-2.0
"""What a set of processes holds on this machine, and what of it stays when they are gone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_SHARED_MEMORY = "/dev/shm/"  # noqa: S108  # looked at, never written


@dataclass
class Footprint:
    """Shared-memory files and named sockets that processes have open, by path."""

    memory: set[str] = field(default_factory=set)
    sockets: set[str] = field(default_factory=set)

    def add(self, pids: Iterable[int]) -> None:
        """Add what these processes hold now; those that have ended add nothing."""
        inodes: set[str] = set()
        for pid in pids:
            for target in _open_files(pid):
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
                elif target.startswith(_SHARED_MEMORY):
                    self.memory.add(target.removesuffix(" (deleted)"))
        self.sockets |= {name for inode, name in _unix_sockets() if inode in inodes}

    def remains(self) -> list[str]:
        """What is still there, in words; call when the processes have ended."""
        listening = {name for _, name in _unix_sockets()}
        left = [f"shared memory {path}" for path in sorted(self.memory) if Path(path).exists()]
        left += [f"socket {name}" for name in sorted(self.sockets & listening)]
        left += [
            f"socket file {name}"
            for name in sorted(self.sockets)
            if not name.startswith("@") and Path(name).exists()
        ]
        return left


def descendants(session: int, mark: str) -> dict[int, str]:
    """Pid and command line of every live process of a session, or with a mark in its environment.

    Both are needed: a process that renames itself writes over its environment, as vLLM's
    engine and workers do, and an agent has a session of its own. ``mark`` is ``NAME=value``.
    """
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            state, _, _, own_session, *_ = _stat(entry)
            environment = Path("/proc", entry, "environ").read_bytes().split(b"\0")
            ours = int(own_session) == session or mark.encode() in environment
            if ours and state != "Z":
                words = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry)] = words.decode(errors="replace").strip()[:120]
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def _stat(pid: str) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the process' name: state, parent, group, session..."""
    return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()


def _open_files(pid: int) -> set[str]:
    """Targets of a process' descriptors and files that it has mapped."""
    found: set[str] = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    found.add(os.readlink(entry.path))
                except OSError:  # closed meanwhile
                    continue
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            path = line[line.find("/") :] if "/" in line else ""
            if path.startswith(_SHARED_MEMORY):
                found.add(path)
    except OSError:  # the process has ended
        pass
    return found


def _unix_sockets() -> list[tuple[str, str]]:
    """Inode and name of every Unix socket that has a name (``@`` first: an abstract one)."""
    rows = Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]
    fields = (row.split(maxsplit=7) for row in rows)
    return [(row[6], row[7]) for row in fields if len(row) == 8]
