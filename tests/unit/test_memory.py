# SPDX-License-Identifier: Apache-2.0
"""How much memory may be taken, read from a tree of files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ec_connector.pool.memory import memory_room, show_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Host:
    """A made-up ``/proc`` and cgroup mount under a temporary folder."""

    def __init__(self, root: Path, available: int) -> None:
        self.proc = root / "proc"
        self.mount = root / "mounted"
        self.write(self.proc / "meminfo", f"MemTotal: 99 kB\nMemAvailable: {available // KIB} kB\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def cgroup(self, version: int, path: str, root: str = "/") -> None:
        """Say in which cgroup this process is and what of the tree is mounted."""
        own = f"0::{path}\n" if version == 2 else f"3:cpu:/\n4:memory:{path}\n0::/\n"
        kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
        self.write(self.proc / "self" / "cgroup", own)
        lines = [
            "22 1 0:20 / / rw - ext4 /dev/vda rw",
            f"31 22 0:28 {root} {self.mount} rw shared:1 - {kind}",
            f"32 22 0:29 / {self.mount}-cpu rw - cgroup cgroup rw,cpu",
        ]
        self.write(self.proc / "self" / "mountinfo", "\n".join(lines) + "\n")

    def v2(self, path: str, limit: str, used: int, inactive: int = 0) -> None:
        folder = self.mount / path
        self.write(folder / "memory.max", f"{limit}\n")
        self.write(folder / "memory.current", f"{used}\n")
        self.write(folder / "memory.stat", f"anon 1\ninactive_file {inactive}\n")

    def v1(self, path: str, limit: int, used: int, inactive: int = 0) -> None:
        folder = self.mount / path
        self.write(folder / "memory.limit_in_bytes", f"{limit}\n")
        self.write(folder / "memory.usage_in_bytes", f"{used}\n")
        self.write(folder / "memory.stat", f"inactive_file 0\ntotal_inactive_file {inactive}\n")

    def room(self) -> int:
        room = memory_room(self.proc)
        assert room is not None
        return room.nbytes


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """8 GiB available, no cgroup yet."""
    return Host(tmp_path, 8 * GIB)


def test_host_alone(host: Host) -> None:
    """Without a cgroup the host's available memory counts."""
    assert host.room() == 8 * GIB


def test_unknown_system(tmp_path: Path) -> None:
    """A system that tells nothing sets no bound."""
    assert memory_room(tmp_path) is None


def test_v2_limit(host: Host) -> None:
    """A cgroup v2 limit counts less what is in use, and file pages not in use do not count."""
    host.cgroup(2, "/")
    host.v2("", str(4 * GIB), used=3 * GIB, inactive=GIB)
    assert host.room() == 2 * GIB
    room = memory_room(host.proc)
    assert room is not None
    assert "4.0 GiB (4294967296 bytes)" in room.source
    assert "memory.max" in room.details


def test_v2_tightest_of_the_line(host: Host) -> None:
    """A parent's limit binds when it is tighter than the process's own."""
    host.cgroup(2, "/pod/container")
    host.v2("pod/container", "max", used=GIB)
    host.v2("pod", str(2 * GIB), used=GIB)
    host.v2("", "max", used=3 * GIB)
    assert host.room() == GIB


def test_hierarchy_of_another_kind(host: Host) -> None:
    """A mounted hierarchy that this process has no path in sets no bound."""
    host.cgroup(2, "/")
    host.write(host.proc / "self" / "cgroup", "3:cpu:/\n")
    host.v2("", str(GIB), used=0)
    assert host.room() == 8 * GIB


def test_v1_limit(host: Host) -> None:
    """A cgroup v1 limit counts, and its way of writing "none" does not."""
    host.cgroup(1, "/a/b")
    host.v1("a/b", 3 * GIB, used=2 * GIB, inactive=512 * MIB)
    host.v1("a", 9223372036854771712, used=5 * GIB)
    assert host.room() == GIB + 512 * MIB


@pytest.mark.parametrize(
    ("path", "root"),
    [("/docker/abc", "/docker/abc"), ("/../..", "/"), ("/docker/abc", "/elsewhere")],
)
def test_only_the_own_cgroup_is_mounted(host: Host, path: str, root: str) -> None:
    """In a container the mount point is the process's cgroup, whatever path it is told."""
    host.cgroup(1, path, root)
    host.v1("", GIB, used=256 * MIB)
    assert host.room() == 768 * MIB


def test_over_the_limit(host: Host) -> None:
    """More in use than allowed leaves nothing, not a negative size."""
    host.cgroup(2, "/")
    host.v2("", str(GIB), used=2 * GIB)
    assert host.room() == 0


def test_this_host_tells() -> None:
    """The real system gives a figure."""
    room = memory_room()
    assert room is not None
    assert room.nbytes > 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB (1536 bytes)"),
        (64 * MIB, "64.0 MiB (67108864 bytes)"),
        (GIB, "1.0 GiB (1073741824 bytes)"),
        (3 << 40, "3.0 TiB (3298534883328 bytes)"),
    ],
)
def test_show_bytes(nbytes: int, text: str) -> None:
    """Sizes are shown rounded and exact."""
    assert show_bytes(nbytes) == text
