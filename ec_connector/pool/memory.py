# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take, by the host and by each cgroup above it.

A container that takes more than its limit is killed, not told; so the pool is
held against these figures before it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# A limit beyond this is how cgroup v1 writes "none".
_NO_LIMIT = 1 << 60


@dataclass(slots=True, frozen=True)
class Room:
    """``nbytes`` can be had according to ``source``; ``details`` says how that was found."""

    nbytes: int
    source: str
    details: str


def memory_room(proc: Path = Path("/proc")) -> Room | None:
    """The tightest bound on what may still be allocated; None if this system tells none.

    Of a cgroup's usage, file pages not in use (``inactive_file``) do not
    count: the kernel gives them up before it kills.
    """
    rooms = []
    host = _host_room(proc)
    if host is not None:
        rooms.append(host)
    for directory, version in _cgroup_directories(proc):
        room = _cgroup_room(directory, version)
        if room is not None:
            rooms.append(room)
    return min(rooms, key=lambda room: room.nbytes, default=None)


def show_bytes(nbytes: int) -> str:
    """A size for people and for scripts: ``1.5 GiB (1610612736 bytes)``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.1f} {unit} ({nbytes} bytes)"
    return f"{nbytes} bytes"


def _host_room(proc: Path) -> Room | None:
    fields = _read_fields(proc / "meminfo")
    available = fields.get("MemAvailable:", fields.get("MemFree:"))
    if available is None:
        return None
    return Room(available * 1024, "this host", "available memory of the host")


def _cgroup_room(directory: Path, version: int) -> Room | None:
    if version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    else:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit = _read_number(directory / names[0])
    used = _read_number(directory / names[1])
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    used = max(0, used - _read_fields(directory / "memory.stat").get(names[2], 0))
    return Room(
        max(0, limit - used),
        f"the cgroup limit of {show_bytes(limit)}",
        f"{directory / names[0]}, of which {show_bytes(used)} are in use",
    )


def _cgroup_directories(proc: Path) -> list[tuple[Path, int]]:
    """Where this process's memory cgroup and those above it are mounted, with their version."""
    paths: dict[int, str] = {}
    for line in _read_lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    found = []
    for line in _read_lines(proc / "self" / "mountinfo"):
        left, _, right = line.partition(" - ")
        root, mount_point = left.split(" ")[3:5]
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2":
            version = 2
        elif kind == "cgroup" and "memory" in options.split(" ")[-1].split(","):
            version = 1
        else:
            continue
        if version not in paths:
            continue
        top = Path(mount_point)
        below = _below(paths[version], root)
        found += [(top.joinpath(*below[:depth]), version) for depth in range(len(below), -1, -1)]
    return found


def _below(path: str, root: str) -> list[str]:
    """The parts of ``path`` under the mounted ``root``; none if it is not under it.

    Without a cgroup namespace a container sees its host path here, while only
    its own cgroup is mounted: that one is then the mount point itself.
    """
    parts = [part for part in path.split("/") if part]
    root_parts = [part for part in root.split("/") if part]
    if ".." in parts or parts[: len(root_parts)] != root_parts:
        return []
    return parts[len(root_parts) :]


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_number(path: Path) -> int | None:
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _read_fields(path: Path) -> dict[str, int]:
    """Lines of ``name number ...``."""
    pairs = (line.split() for line in _read_lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}
