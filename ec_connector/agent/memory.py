# SPDX-License-Identifier: Apache-2.0
"""How this process uses the heap."""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 64 * 1024 * 1024


def keep_buffers() -> None:
    """Have the C heap keep the buffers of received frames, up to 64 MiB, and use them again.

    By default glibc gives each large buffer back to the kernel, which clears the pages of the
    next one: for payload frames of a MiB that costs as much as receiving them. Other C
    libraries have no such call and are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD):
            mallopt(option, _KEPT_BYTES)


def settle() -> None:
    """Leave everything that exists now out of later garbage collections."""
    gc.collect()
    gc.freeze()
