# SPDX-License-Identifier: Apache-2.0
"""Shared memory without a name: allocated whole, sealed against shrinking, mapped ahead."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator

from ec_connector.errors import RegionError
from ec_connector.pool.memory import memory_room, show_bytes

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; some hosts insist on it, older ones do not know it
# Linux 5.14; the mmap module does not name them.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23


def allocate(size: int) -> int:
    """A descriptor of ``size`` zeroed bytes without a name, for this user only.

    A memfd; where that is not to be had, an unnamed file in ``/dev/shm`` or the
    temporary folder. Raises RegionError naming what was asked for and what is
    available if this host or this container does not have so much.
    """
    _check_memory(size)
    failures = []
    for where in _places():
        try:
            fd = _memfd() if where == "memfd" else _unnamed_file(where)
        except OSError as error:
            failures.append(f"{where}: {error.strerror}")
            continue
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
            # An error here, rather than a fatal signal when the pages are touched.
            os.posix_fallocate(fd, 0, size)
            if where == "memfd":
                # So that no process that has it open can cut pages off under the others.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(fd)
            failures.append(f"{where}: {error.strerror}")
            continue
        return fd
    raise RegionError(f"no memory for a pool of {show_bytes(size)}: {'; '.join(failures)}")


def populate(mapping: mmap.mmap, *, writable: bool) -> None:
    """Map every page now, for writing or for reading only. Raises OSError."""
    try:
        mapping.madvise(_MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # An older kernel. Reading a byte a page is enough: the pages are there already, they
        # are only mapped; and writing back could undo what another process writes just now.
        _ = mapping[:: mmap.PAGESIZE]


def _places() -> Iterator[str]:
    yield "memfd"
    yield "/dev/shm"  # noqa: S108 - no name is made there
    # Asked for only here: a container with a read-only root may have no such folder at all.
    with contextlib.suppress(FileNotFoundError):
        yield tempfile.gettempdir()


def _check_memory(size: int) -> None:
    room = memory_room()
    if room is not None and size > room.nbytes:
        raise RegionError(
            f"a pool of {show_bytes(size)} does not fit: {room.source} leaves "
            f"{show_bytes(room.nbytes)} available ({room.details}). "
            "Ask for a smaller pool or give the process more memory"
        )


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("ec_connector", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("ec_connector", flags)


def _unnamed_file(directory: str) -> int:
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
