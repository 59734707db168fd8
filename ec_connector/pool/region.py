# SPDX-License-Identifier: Apache-2.0
"""The pool's memory: one anonymous region that several processes map.

Layout, numbers little-endian::

    0       magic "ECPOOL" and layout version (u16)     8 bytes
    8       data offset, block size, number of blocks   3 x u64
    32      token: tells peers which region it is       16 bytes
    48      secret: for who maps it alone               32 bytes
    page 1  generation of each block                    u64 each
    ...     data, from the next page on: block 0, block 1, ...

The memory has no name anywhere: it is gone with the last process that has it
open, however that one ends. Others open it as ``/proc/<pid>/fd/<fd>`` of the
process that made it, which the kernel allows to the same user only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Sequence

from ec_connector.errors import RegionError
from ec_connector.pool.memory import show_bytes
from ec_connector.pool.pages import allocate, populate
from ec_connector.protocol.messages import RegionRef
from ec_connector.protocol.shown import SECRET_BYTES

_PAGE = mmap.PAGESIZE
_MAGIC = b"ECPOOL\x02\x00"
_HEADER = struct.Struct(f"<8s3Q16s{SECRET_BYTES}s")
_SECRET_OFFSET = _HEADER.size - SECRET_BYTES
_TABLE_OFFSET = _PAGE
_BLOCK_ALIGNMENT = 8  # rows of any dtype start aligned


class Region:
    """A mapped pool region: ``num_blocks`` blocks of ``block_bytes`` bytes, and a table.

    ``ref`` is what another process needs to open it; ``ref.nbytes`` counts the
    blocks alone, without header and table. ``buffer`` is all blocks as one flat
    uint8 view that starts on a page. ``secret`` proves what is shown of it (protocol/shown.py).
    """

    def __init__(self, ref: RegionRef, mapping: mmap.mmap, *, writable: bool, fd: int) -> None:
        """Use :meth:`create` or :meth:`open`. ``fd`` is kept open until closed (-1: none)."""
        self.ref = ref
        self.block_bytes = ref.block_bytes
        self.num_blocks = ref.nbytes // ref.block_bytes
        self.writable = writable
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        whole = memoryview(mapping)
        self.secret = bytes(whole[_SECRET_OFFSET : _HEADER.size])
        data = _data_offset(self.num_blocks)
        self._generations = whole[_TABLE_OFFSET : _TABLE_OFFSET + 8 * self.num_blocks].cast("Q")
        self._data = whole[data : data + ref.nbytes]

    @classmethod
    def create(cls, nbytes: int, block_bytes: int) -> Region:
        """Make a zeroed region of as many whole blocks as ``nbytes`` holds, all of it in memory.

        Raises:
            RegionError: less than one block, a block size that is not a
                multiple of 8, or more memory than this process can have.
        """
        if block_bytes < 1 or block_bytes % _BLOCK_ALIGNMENT:
            raise RegionError(
                f"a block of {block_bytes} bytes: it must be a multiple of {_BLOCK_ALIGNMENT}"
            )
        num_blocks = nbytes // block_bytes
        if num_blocks < 1:
            raise RegionError(
                f"a pool of {nbytes} bytes does not hold one block of {block_bytes} bytes"
            )
        data = _data_offset(num_blocks)
        size = data + num_blocks * block_bytes
        fd = allocate(size)
        try:
            token = secrets.token_bytes(16)
            secret = secrets.token_bytes(SECRET_BYTES)
            header = _HEADER.pack(_MAGIC, data, block_bytes, num_blocks, token, secret)
            os.pwrite(fd, header, 0)
            mapping = mmap.mmap(fd, size)
            populate(mapping, writable=True)
        except OSError as error:
            os.close(fd)
            raise RegionError(f"cannot map a pool of {show_bytes(size)}: {error}") from error
        ref = RegionRef(
            pid=os.getpid(),
            fd=fd,
            nbytes=num_blocks * block_bytes,
            block_bytes=block_bytes,
            token=token.hex(),
        )
        return cls(ref, mapping, writable=True, fd=fd)

    @classmethod
    def open(cls, ref: RegionRef, *, writable: bool) -> Region:
        """Map the region that another process (or this one) made.

        ``ref`` may come from a peer and is not trusted: nothing but a region
        with its token is opened, and a descriptor that is something else is
        neither read nor waited for.

        Raises:
            RegionError: the process or its descriptor is gone or not ours to
                open, or it is not that region; the text says which.
        """
        where = f"descriptor {ref.fd} of process {ref.pid}"
        size = _size_of(ref)
        try:
            with _opened(f"/proc/{ref.pid:d}/fd/{ref.fd:d}", os.O_PATH) as path_fd:
                _check_kind(os.fstat(path_fd), size, where)
                # Only what has been looked at is opened: the path may have changed meanwhile.
                # O_NONBLOCK, because somebody may hold a lease on a file.
                flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK | os.O_NOCTTY
                with _opened(f"/proc/self/fd/{path_fd}", flags) as fd:
                    _check_cannot_shrink(fd, where)
                    _check_header(os.pread(fd, _HEADER.size, 0), ref, where)
                    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                    mapping = mmap.mmap(fd, size, access=access)
        except FileNotFoundError as error:
            raise RegionError(f"{where} does not exist (any more)") from error
        except PermissionError as error:
            raise RegionError(f"{where} may not be opened by user {os.geteuid()}") from error
        except OSError as error:
            raise RegionError(f"{where} cannot be mapped: {error}") from error
        return cls(ref, mapping, writable=writable, fd=-1)

    @property
    def buffer(self) -> memoryview:
        """All blocks, flat uint8, page aligned. Raises RegionError once closed."""
        self._open_mapping()
        return self._data

    def views(self, extents: Sequence[tuple[int, int]], nbytes: int) -> list[memoryview]:
        """The first ``nbytes`` bytes of these extents, one flat uint8 view a piece, in order.

        Raises:
            RegionError: an extent is outside the region, they hold less than
                ``nbytes``, or the region is closed.
        """
        self._open_mapping()
        views = []
        left = nbytes
        for start, count in extents:
            if start < 0 or count < 1 or start + count > self.num_blocks:
                raise RegionError(
                    f"extent of {count} blocks at {start} in a region of {self.num_blocks}"
                )
            size = min(left, count * self.block_bytes)
            if size > 0:
                offset = start * self.block_bytes
                views.append(self._data[offset : offset + size])
                left -= size
        if left or nbytes < 0:
            raise RegionError(
                f"{nbytes} bytes asked of {len(extents)} extents that hold {nbytes - left}"
            )
        return views

    def generation(self, block: int) -> int:
        """The generation noted for a block; 0 if none.

        Whoever copies from a region of another process reads this after the
        copy: if it is not the generation that was granted, the copy may be torn.
        """
        self._check_block(block)
        return self._generations[block]

    def set_generation(self, block: int, value: int) -> None:
        """Note the generation of the entry that starts at this block (0: none)."""
        self._check_block(block)
        if not self.writable:
            raise RegionError("the region is mapped read-only")
        self._generations[block] = value

    def populate(self) -> None:
        """Have every page mapped now instead of at its first use.

        Worth it where a page fault would delay an engine step: 4.7 MB of blocks
        not used before cost some 2 ms otherwise. Takes about 0.2 s a GiB and
        holds the GIL meanwhile. A region that this process made is mapped so already.
        Raises RegionError if there is no memory for the page tables.
        """
        try:
            populate(self._open_mapping(), writable=self.writable)
        except OSError as error:
            raise RegionError(f"cannot map all of the region: {error}") from error

    def close(self) -> None:
        """Unmap, as soon as no view of it is left. Safe to call again."""
        if self._mapping is None:
            return
        mapping, self._mapping = self._mapping, None
        self._generations = self._data = memoryview(b"")
        # Views that somebody still holds keep the mapping; it goes with the last of them.
        with contextlib.suppress(BufferError):
            mapping.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open_mapping(self) -> mmap.mmap:
        if self._mapping is None:
            raise RegionError("the region is closed")
        return self._mapping

    def _check_block(self, block: int) -> None:
        self._open_mapping()
        if not 0 <= block < self.num_blocks:
            raise RegionError(f"block {block} in a region of {self.num_blocks}")


def _data_offset(num_blocks: int) -> int:
    return -(-(_TABLE_OFFSET + 8 * num_blocks) // _PAGE) * _PAGE


def _size_of(ref: RegionRef) -> int:
    """Bytes of the whole region, header and table included. Raises RegionError."""
    if ref.block_bytes < 1 or ref.nbytes < ref.block_bytes or ref.nbytes % ref.block_bytes:
        raise RegionError(f"{ref.nbytes} bytes are not whole blocks of {ref.block_bytes} bytes")
    return _data_offset(ref.nbytes // ref.block_bytes) + ref.nbytes


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _check_kind(status: os.stat_result, size: int, where: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RegionError(f"{where} is not memory but a {_kind(status.st_mode)}")
    if status.st_nlink:
        raise RegionError(f"{where} is a file with a name, not a region")
    if status.st_size != size:
        raise RegionError(f"{where} has {status.st_size} bytes, the region {size}")


def _kind(mode: int) -> str:
    for kind, test in (
        ("FIFO", stat.S_ISFIFO),
        ("socket", stat.S_ISSOCK),
        ("device", lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode)),
        ("directory", stat.S_ISDIR),
    ):
        if test(mode):
            return kind
    return "descriptor of another kind"


def _check_cannot_shrink(fd: int, where: str) -> None:
    """A file that is cut off under a mapping kills the reader: trust a seal, or our own user."""
    try:
        sealed = bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        sealed = False
    if not sealed and os.fstat(fd).st_uid != os.geteuid():
        raise RegionError(f"{where} belongs to another user, who could cut it off")


def _check_header(header: bytes, ref: RegionRef, where: str) -> None:
    num_blocks = ref.nbytes // ref.block_bytes
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise RegionError(f"{where} holds no region of this layout version")
    _, data, block_bytes, blocks, token, _ = _HEADER.unpack(header)
    # The token first: only who has it learns more about the region.
    if not hmac.compare_digest(token.hex().encode(), ref.token.encode()):
        raise RegionError(f"{where} is another region: its token differs")
    if (data, block_bytes, blocks) != (_data_offset(num_blocks), ref.block_bytes, num_blocks):
        raise RegionError(
            f"{where} has {blocks} blocks of {block_bytes} bytes at {data}, "
            f"not {num_blocks} of {ref.block_bytes}"
        )
