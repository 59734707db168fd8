# SPDX-License-Identifier: Apache-2.0
"""The shared memory region, alone and between real processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ec_connector.errors import RegionError
from ec_connector.pool import memory, pages
from ec_connector.pool import region as region_module
from ec_connector.pool.region import Region
from ec_connector.protocol.messages import RegionRef

MIB = 1 << 20
BLOCK = 4096

CREATOR = f"""
import sys
import msgspec
from ec_connector.pool.region import Region

region = Region.create(4 * {MIB}, {BLOCK})
region.buffer[:5] = b"hello"
region.set_generation(3, 33)
print(msgspec.json.encode(region.ref).decode(), flush=True)
for line in sys.stdin:
    print(bytes(region.buffer[100:105]).decode(), region.generation(7), flush=True)
"""

OTHER_USER = """
import os, sys
import msgspec
from ec_connector.errors import RegionError
from ec_connector.pool.region import Region
from ec_connector.protocol.messages import RegionRef

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    Region.open(msgspec.json.decode(sys.argv[1], type=RegionRef), writable=False)
except RegionError as error:
    print(error)
else:
    print("opened")
"""


@pytest.fixture
def region() -> Iterator[Region]:
    """A region of 16 blocks of 4096 bytes."""
    region = Region.create(16 * BLOCK, BLOCK)
    yield region
    region.close()


class Creator:
    """A process that made a region and tells what stands in it when asked."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CREATOR],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self.process.stdout is not None
        self.ref = msgspec.json.decode(self.process.stdout.readline(), type=RegionRef)

    def tell(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("tell\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def creator() -> Iterator[Creator]:
    """A region made by another process, which is killed in the end."""
    creator = Creator()
    yield creator
    creator.kill()


def ref_of(fd: int, like: RegionRef) -> RegionRef:
    """``like``, but for a descriptor of this process."""
    return msgspec.structs.replace(like, pid=os.getpid(), fd=fd)


# ── one process ──────────────────────────────────────────────────────────────


def test_create(region: Region) -> None:
    """A new region is zeroed, page aligned, private to its user and described by its ref."""
    assert (region.num_blocks, region.block_bytes) == (16, BLOCK)
    assert (region.ref.pid, region.ref.nbytes) == (os.getpid(), 16 * BLOCK)
    assert (region.buffer.format, region.buffer.nbytes) == ("B", 16 * BLOCK)
    assert bytes(region.buffer) == bytes(16 * BLOCK)
    assert os.fstat(region.ref.fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(region.ref.fd)
    assert [region.generation(block) for block in range(16)] == [0] * 16


@pytest.mark.parametrize("num_blocks", [1, 511, 512, 513])
def test_table_and_data_do_not_overlap(num_blocks: int) -> None:
    """The last generation and the first block are apart, at any size of the table."""
    region = Region.create(num_blocks * 64, 64)
    region.buffer[:] = b"\xff" * (num_blocks * 64)
    assert region.generation(num_blocks - 1) == 0
    region.set_generation(num_blocks - 1, 2**64 - 1)
    assert region.generation(num_blocks - 1) == 2**64 - 1
    assert bytes(region.buffer) == b"\xff" * (num_blocks * 64)
    region.close()


def test_whole_blocks_only() -> None:
    """A size that is not whole blocks is rounded down."""
    region = Region.create(5 * BLOCK - 1, BLOCK)
    assert (region.num_blocks, region.ref.nbytes) == (4, 4 * BLOCK)
    region.close()


@pytest.mark.parametrize(
    ("nbytes", "block_bytes", "text"),
    [(100, 4096, "not hold one block"), (4096, 0, "multiple of 8"), (4096, 12, "multiple of 8")],
)
def test_impossible_sizes(nbytes: int, block_bytes: int, text: str) -> None:
    """No blocks, or blocks that would leave rows unaligned, are refused."""
    with pytest.raises(RegionError, match=text):
        Region.create(nbytes, block_bytes)


def test_views(region: Region) -> None:
    """Extents come as flat views in order, trimmed to the item, onto the region itself."""
    views = region.views([(2, 2), (9, 1)], 2 * BLOCK + 10)
    assert [view.nbytes for view in views] == [2 * BLOCK, 10]
    views[0][0] = 7
    views[1][9] = 8
    assert region.buffer[2 * BLOCK] == 7
    assert region.buffer[9 * BLOCK + 9] == 8
    assert [view.nbytes for view in region.views([(0, 1), (1, 1)], 5)] == [5]
    assert region.views([], 0) == []


@pytest.mark.parametrize(
    ("extents", "nbytes"),
    [
        ([(15, 2)], 10),
        ([(-1, 1)], 10),
        ([(0, 0)], 0),
        ([(3, -1)], 10),
        ([(0, 1), (16, 1)], 10),
        ([(0, 1)], BLOCK + 1),
        ([(0, 1)], -1),
        ([], 1),
    ],
)
def test_views_outside(region: Region, extents: list[tuple[int, int]], nbytes: int) -> None:
    """An extent outside the region, or too little of it, is refused."""
    with pytest.raises(RegionError):
        region.views(extents, nbytes)


@pytest.mark.parametrize("block", [-1, 16])
def test_generation_outside(region: Region, block: int) -> None:
    """A block outside the region has no generation."""
    with pytest.raises(RegionError):
        region.generation(block)
    with pytest.raises(RegionError):
        region.set_generation(block, 1)


def test_close_with_views_out() -> None:
    """Closing twice is fine, and a view that is out stays readable."""
    region = Region.create(BLOCK, BLOCK)
    view = region.views([(0, 1)], 4)[0]
    view[:] = b"rows"
    before = len(os.listdir("/proc/self/fd"))
    region.close()
    region.close()
    assert bytes(view) == b"rows"
    del view
    assert len(os.listdir("/proc/self/fd")) == before - 2  # ours and the mapping's
    for use in (
        lambda: region.buffer,
        lambda: region.views([(0, 1)], 1),
        lambda: region.generation(0),
        region.populate,
    ):
        with pytest.raises(RegionError, match="closed"):
            use()


# ── memory ───────────────────────────────────────────────────────────────────


def test_more_than_there_is() -> None:
    """A pool beyond any memory is refused before anything is taken, naming both figures."""
    with pytest.raises(RegionError, match=r"1024\.0 TiB \(\d+ bytes\) does not fit.*available"):
        Region.create(1 << 50, 1 << 20)


def test_more_than_the_container_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit is named as the reason."""
    room = memory.Room(3 * MIB, "the cgroup limit of 64.0 MiB", "/x/memory.max")
    monkeypatch.setattr(pages, "memory_room", lambda: room)
    with pytest.raises(RegionError) as caught:
        Region.create(4 * MIB, BLOCK)
    assert "4.0 MiB (4206592 bytes)" in str(caught.value)
    assert "the cgroup limit of 64.0 MiB leaves 3.0 MiB (3145728 bytes)" in str(caught.value)


def resident_kib(region: Region) -> int:
    """How much of a region is mapped into this process, by the kernel's word."""
    inode = f" {os.fstat(region.ref.fd).st_ino} "
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    total = 0
    for line in lines:
        if inode in line:
            total += int(next(rest for rest in lines if rest.startswith("Rss:")).split()[1])
    return total


@pytest.mark.parametrize("kernel", ["this", "old"])
def test_all_pages_are_there(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Every page is mapped before the first use, with or without the kernel's call for it."""
    if kernel == "old":
        monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 9999)
    region = Region.create(4 * MIB, BLOCK)
    assert resident_kib(region) >= 4 * 1024
    region.close()


@pytest.mark.parametrize("writable", [True, False])
def test_populate(writable: bool) -> None:
    """Who opens a region maps its pages when asked to, and changes nothing by it."""
    region = Region.create(4 * MIB, BLOCK)
    region.buffer[:3] = b"abc"
    again = Region.open(region.ref, writable=writable)
    before = resident_kib(region)
    again.populate()
    assert resident_kib(region) >= before + 4 * 1024 - 128
    assert bytes(again.buffer[:3]) == b"abc"
    again.close()
    region.close()


def no_memfd(*_: object) -> int:
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_without_memfd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where memfd is forbidden an unnamed file serves, and can be opened as well."""
    monkeypatch.setattr(os, "memfd_create", no_memfd)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = sorted(os.listdir("/dev/shm"))
    region = Region.create(MIB, BLOCK)
    assert sorted(os.listdir("/dev/shm")) == before
    assert os.listdir(tmp_path) == []
    other = Region.open(region.ref, writable=True)
    other.buffer[:2] = b"ok"
    assert bytes(region.buffer[:2]) == b"ok"
    other.close()
    region.close()


def no_folder() -> str:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")


def test_without_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container whose root is read-only may have none, and needs none."""
    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    Region.create(MIB, BLOCK).close()

    def no_file(directory: str) -> int:
        raise OSError(errno.EROFS, f"Read-only file system: {directory}")

    monkeypatch.setattr(os, "memfd_create", no_memfd)
    monkeypatch.setattr(pages, "_unnamed_file", no_file)
    with pytest.raises(RegionError, match=r"memfd: Function not .*; /dev/shm: Read-only .*shm$"):
        Region.create(MIB, BLOCK)


def test_nowhere_to_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no kind of memory can be had, each failure is told and no descriptor is left."""

    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RegionError, match=r"memfd: No space left.*/dev/shm: No space left"):
        Region.create(MIB, BLOCK)
    assert os.listdir("/proc/self/fd") == before


def no_memory(*_: object, **__: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_cannot_map(monkeypatch: pytest.MonkeyPatch, region: Region) -> None:
    """When the kernel does not map, the text says why and no descriptor is left."""
    monkeypatch.setattr(region_module, "populate", no_memory)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RegionError, match=r"cannot map a pool of .*Cannot allocate"):
        Region.create(MIB, BLOCK)
    gc.collect()
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(RegionError, match=r"cannot map all of the region.*Cannot allocate"):
        region.populate()


def test_memfd_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal of memfd is not taken for an old kernel: it is not asked a second time."""
    asked = []

    def refuse(name: str, flags: int) -> int:
        asked.append(flags)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    Region.create(BLOCK, BLOCK).close()
    assert len(asked) == 1


def test_kernel_without_noexec(monkeypatch: pytest.MonkeyPatch, region: Region) -> None:
    """A kernel that does not know the newest memfd flag is asked without it."""
    monkeypatch.setattr(pages, "_MFD_NOEXEC_SEAL", 1 << 20)
    other = Region.create(BLOCK, BLOCK)
    assert os.readlink(f"/proc/self/fd/{other.ref.fd}").startswith("/memfd:")
    other.close()


# ── several processes ────────────────────────────────────────────────────────


def test_two_processes_share(creator: Creator) -> None:
    """Bytes and generations written by either process are seen by the other."""
    region = Region.open(creator.ref, writable=True)
    assert bytes(region.buffer[:5]) == b"hello"
    assert region.generation(3) == 33
    region.buffer[100:105] = b"world"
    region.set_generation(7, 77)
    assert creator.tell() == "world 77"
    region.close()


def test_read_only(creator: Creator) -> None:
    """Opened for reading, a region cannot be changed."""
    region = Region.open(creator.ref, writable=False)
    assert region.buffer.readonly
    assert bytes(region.buffer[:5]) == b"hello"
    with pytest.raises(TypeError):
        region.views([(0, 1)], 1)[0][0] = 1
    with pytest.raises(RegionError, match="read-only"):
        region.set_generation(0, 1)
    assert region.generation(3) == 33
    region.close()


def test_nobody_can_cut_it_off(creator: Creator) -> None:
    """A process that has the region open cannot make it shorter under the others."""
    with open(f"/proc/{creator.ref.pid}/fd/{creator.ref.fd}", "r+b") as file:
        for size in (0, 64 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(file.fileno(), size)


def holders(inode: int) -> set[str]:
    """Which processes have this region open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            lines = (process / "maps").read_text().splitlines()
            if any("/memfd:ec_connector" in line and f" {inode} " in line for line in lines):
                found.add(process.name)
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    named = os.readlink(fd).startswith("/memfd:ec_connector")
                    if named and fd.stat().st_ino == inode:
                        found.add(process.name)
    return found


def test_nothing_is_left_after_kill_9() -> None:
    """A killed process leaves no name and nobody with its memory; who mapped it can read on."""
    creator = Creator()
    me, other = str(os.getpid()), str(creator.ref.pid)
    region = Region.open(creator.ref, writable=False)
    status = os.stat(f"/proc/{other}/fd/{creator.ref.fd}")
    assert status.st_nlink == 0
    assert os.stat("/dev/shm").st_dev != status.st_dev
    assert holders(status.st_ino) == {me, other}
    creator.kill()
    assert bytes(region.buffer[:5]) == b"hello"
    with pytest.raises(RegionError, match="does not exist"):
        Region.open(creator.ref, writable=False)
    assert holders(status.st_ino) == {me}
    region.close()
    assert holders(status.st_ino) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user")
def test_another_user_cannot_open(creator: Creator) -> None:
    """A process of another user is refused by the kernel, and told so."""
    result = subprocess.run(
        [sys.executable, "-c", OTHER_USER, msgspec.json.encode(creator.ref).decode()],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    assert "may not be opened by user 65534" in result.stdout


# ── not the region ───────────────────────────────────────────────────────────


def a_fifo(folder: Path) -> int:
    os.mkfifo(folder / "fifo")
    return os.open(folder / "fifo", os.O_RDWR)


def a_pipe_without_reader(folder: Path) -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def a_device(folder: Path) -> int:
    return os.open("/dev/zero", os.O_RDWR)


def a_directory(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY)


def a_socket(folder: Path) -> int:
    return socket.socket().detach()


def an_event(folder: Path) -> int:
    return os.eventfd(0)


def a_named_file(folder: Path) -> int:
    return os.open(folder / "file", os.O_RDWR | os.O_CREAT)


def a_short_memfd(folder: Path) -> int:
    return os.memfd_create("short")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (a_fifo, "FIFO"),
        (a_pipe_without_reader, "FIFO"),
        (a_device, "device"),
        (a_directory, "directory"),
        (a_socket, "socket"),
        (an_event, "another kind"),
        (a_named_file, "a file with a name"),
        (a_short_memfd, r"has 0 bytes, the region \d+"),
    ],
)
@pytest.mark.parametrize("writable", [True, False])
def test_odd_descriptors(
    region: Region, tmp_path: Path, make: Callable[[Path], int], text: str, writable: bool
) -> None:
    """What is not a region is neither waited for nor read, and the text says what it is."""
    fd = make(tmp_path)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RegionError, match=text):
        Region.open(ref_of(fd, region.ref), writable=writable)
    assert os.listdir("/proc/self/fd") == before
    os.close(fd)


def test_memory_of_somebody_else(region: Region) -> None:
    """Other memory of the right size is not taken for a region."""
    fd = os.memfd_create("other")
    os.ftruncate(fd, os.fstat(region.ref.fd).st_size)
    with pytest.raises(RegionError, match="no region of this layout"):
        Region.open(ref_of(fd, region.ref), writable=False)
    os.close(fd)


def test_another_region(region: Region) -> None:
    """A region with another token (a recycled process id) is refused."""
    other = Region.create(16 * BLOCK, BLOCK)
    with pytest.raises(RegionError, match="token differs"):
        Region.open(ref_of(other.ref.fd, region.ref), writable=False)
    other.close()


def test_other_layout_of_the_same_size(region: Region) -> None:
    """A reference that divides the region otherwise is refused."""
    ref = msgspec.structs.replace(region.ref, block_bytes=BLOCK // 2)
    with pytest.raises(RegionError, match="has 16 blocks of 4096 bytes"):
        Region.open(ref, writable=False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fd": 9999}, "does not exist"),
        ({"fd": -1}, "does not exist"),
        ({"pid": 2**22 + 1}, "does not exist"),
        ({"pid": 0}, "does not exist"),
        ({"nbytes": 17 * BLOCK}, "bytes, the region"),
        ({"nbytes": 16 * BLOCK + 1}, "not whole blocks"),
        ({"nbytes": 0}, "not whole blocks"),
        ({"block_bytes": 0}, "not whole blocks"),
        ({"token": ""}, "token differs"),
        ({"token": "ü"}, "token differs"),
    ],
)
def test_wrong_reference(region: Region, change: dict[str, object], text: str) -> None:
    """Each wrong field of a reference is refused with its reason."""
    with pytest.raises(RegionError, match=text):
        Region.open(msgspec.structs.replace(region.ref, **change), writable=True)


def test_open_never_waits(region: Region) -> None:
    """Memory under a lease of another holder, at which an open would wait, is refused at once."""
    # The kernel asks the holder to give the lease up by SIGIO, which ends a process.
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    os.write(fd, os.pread(region.ref.fd, os.fstat(region.ref.fd).st_size, 0))
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        with pytest.raises(RegionError, match=r"cannot be mapped.*unavailable"):
            Region.open(ref_of(fd, region.ref), writable=False)
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


def test_unnamed_file_on_a_disk(region: Region, tmp_path: Path) -> None:
    """A region in an unnamed file of our own, which knows no seals, is opened."""
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(os.pread(region.ref.fd, os.fstat(region.ref.fd).st_size, 0))
        file.flush()
        again = Region.open(ref_of(file.fileno(), region.ref), writable=True)
        assert again.num_blocks == 16
        again.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can own files as another user")
def test_unsealed_memory_of_another_user(region: Region) -> None:
    """Memory that another user could cut off, killing the reader, is not mapped."""
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.write(fd, os.pread(region.ref.fd, os.fstat(region.ref.fd).st_size, 0))
    Region.open(ref_of(fd, region.ref), writable=False).close()
    os.fchown(fd, 65534, 65534)
    with pytest.raises(RegionError, match="another user"):
        Region.open(ref_of(fd, region.ref), writable=False)
    os.close(fd)
