# SPDX-License-Identifier: Apache-2.0
"""Pool memory for tests: plain bytes that are spoilt as soon as nobody may rely on them."""

from __future__ import annotations

from collections.abc import Sequence

from ec_connector.pool.blocks import BlockPool, Entry

_SPOILT = 0xDB


class PlainMemory:
    """Memory behind a pool, without any mapping. Freed blocks are overwritten at once."""

    def __init__(self, pool: BlockPool) -> None:
        self._block = pool.block_bytes
        self._bytes = bytearray([_SPOILT]) * (pool.num_blocks * pool.block_bytes)
        self._generations = [0] * pool.num_blocks
        pool.on_ready = self._on_ready
        pool.on_free = self._on_free

    def read(self, extents: Sequence[tuple[int, int]], nbytes: int, offset: int = 0) -> bytes:
        """Bytes ``offset`` to ``offset + nbytes`` of what lies in these extents."""
        runs = [self._bytes[self._slice(*extent)] for extent in extents]
        return b"".join(runs)[offset : offset + nbytes]

    def write(self, extents: Sequence[tuple[int, int]], data: bytes, offset: int = 0) -> None:
        """Write ``data`` at ``offset`` of these extents. Raises ValueError if it does not fit."""
        at = 0
        for start, count in extents:
            first = max(offset - at, 0)
            last = min(offset + len(data) - at, count * self._block)
            if first < last:
                piece = data[at + first - offset : at + last - offset]
                base = start * self._block
                self._bytes[base + first : base + last] = piece
            at += count * self._block
        if offset + len(data) > at:
            raise ValueError(f"{len(data)} bytes at {offset} do not fit in {at}")

    def generation(self, block: int) -> int:
        """The generation that lies at this block; 0: none."""
        return self._generations[block]

    def _slice(self, start: int, count: int) -> slice:
        return slice(start * self._block, (start + count) * self._block)

    def _on_ready(self, entry: Entry) -> None:
        self._generations[entry.extents[0][0]] = entry.generation

    def _on_free(self, entry: Entry) -> None:
        self._generations[entry.extents[0][0]] = 0
        for start, count in entry.extents:
            self._bytes[self._slice(start, count)] = bytes([_SPOILT]) * (count * self._block)
