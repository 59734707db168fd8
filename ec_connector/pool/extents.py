# SPDX-License-Identifier: Apache-2.0
"""Which runs of blocks are free: a two-level segregated fit with coalescing.

Free runs lie in bins by size: one bin per size below 16 blocks, above that
eight bins per power of two. A bitmap says which bins hold something, so taking
and giving back a run cost the same however many runs there are.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from ec_connector.errors import InternalError

_OWN_BIN_TRIES = 8  # a run's own bin may hold shorter ones; look at this many before going up


def _bin_of(size: int) -> int:
    if size < 16:
        return size
    shift = size.bit_length() - 4
    return (shift << 3) + (size >> shift)


class FreeExtents:
    """The free runs of blocks ``0 .. num_blocks - 1``; at first all of them, as one run."""

    def __init__(self, num_blocks: int) -> None:
        self.total = 0
        """Free blocks."""
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}  # first block after a run -> its first block
        self._bins: dict[int, OrderedDict[int, None]] = {}
        self._filled = 0  # bit b set: bin b is not empty
        if num_blocks:
            self._insert(0, num_blocks)

    def take_run(self, need: int) -> int | None:
        """Take ``need`` blocks in one run and return the first; None if no such run is found.

        Close fit first. A fitting run can be overlooked only in the bin of
        ``need`` itself, behind eight shorter ones.
        """
        start = self._find(need)
        if start is None:
            return None
        size = self._remove(start)
        if size > need:
            self._insert(start + need, size - need)
        return start

    def take(self, need: int, max_pieces: int) -> list[tuple[int, int]] | None:
        """Take ``need`` blocks as at most ``max_pieces`` runs, large ones first.

        Returns them as (first block, count) in block order; None, and nothing
        taken, if that many do not hold enough.
        """
        chosen: list[int] = []
        got = 0
        filled = self._filled
        while got < need:
            if not filled:
                return None
            top = filled.bit_length() - 1
            filled ^= 1 << top
            for start in self._bins[top]:
                if len(chosen) == max_pieces:
                    return None
                chosen.append(start)
                got += self._size_at[start]
                if got >= need:
                    break
        last = chosen.pop()
        left = need - (got - self._size_at[last])
        pieces = [(start, self._remove(start)) for start in chosen]
        # Of the last only a part is needed: a closer fit may spare a long run.
        fit = self.take_run(left)
        if fit is None:
            raise InternalError(f"no run of {left} blocks though one starts at block {last}")
        pieces.append((fit, left))
        return sorted(pieces)

    def give(self, start: int, count: int) -> None:
        """Make a run free again, joined with its free neighbours."""
        before = self._start_before.get(start)
        after = self._size_at.get(start + count)
        if after is not None:
            self._remove(start + count)
            count += after
        if before is not None:
            count += self._remove(before)
            start = before
        self._insert(start, count)

    def run_after_giving(self, start: int, count: int) -> int:
        """How long the free run would be that giving this one makes."""
        before = self._start_before.get(start)
        joined = count + self._size_at.get(start + count, 0)
        return joined if before is None else joined + self._size_at[before]

    def largest(self) -> int:
        """Blocks in the longest free run."""
        if not self._filled:
            return 0
        return max(self._size_at[start] for start in self._bins[self._filled.bit_length() - 1])

    def runs(self) -> list[tuple[int, int]]:
        """Every free run as (first block, count), in block order."""
        return sorted(self._size_at.items())

    def validate(self) -> None:
        """Raises InternalError if the indexes disagree or two free runs touch."""
        end_before = -1
        for start, size in self.runs():
            if size <= 0 or start <= end_before:
                raise InternalError(f"free run of {size} at {start} touches one up to {end_before}")
            end_before = start + size
            if self._start_before.get(end_before) != start:
                raise InternalError(f"free run of {size} at {start} is not indexed by its end")
            if start not in self._bins.get(_bin_of(size), ()):
                raise InternalError(f"free run of {size} at {start} is not in its bin")
        binned = sum(len(bin_) for bin_ in self._bins.values())
        if not binned == len(self._size_at) == len(self._start_before):
            raise InternalError(f"{len(self._size_at)} free runs but {binned} binned")
        if self.total != sum(self._size_at.values()):
            raise InternalError(f"{self.total} blocks counted free, runs hold another number")
        if self._filled != sum(1 << number for number, bin_ in self._bins.items() if bin_):
            raise InternalError("the bitmap of filled bins is wrong")

    def _find(self, need: int) -> int | None:
        own = _bin_of(need)
        if self._filled >> own & 1:
            for start in islice(self._bins[own], _OWN_BIN_TRIES):
                if self._size_at[start] >= need:
                    return start
        above = self._filled >> (own + 1)
        if not above:
            return None
        number = own + (above & -above).bit_length()
        return next(iter(self._bins[number]))

    def _insert(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_before[start + size] = start
        number = _bin_of(size)
        # An OrderedDict, for its first key is found in constant time after any deletions.
        self._bins.setdefault(number, OrderedDict())[start] = None
        self._filled |= 1 << number
        self.total += size

    def _remove(self, start: int) -> int:
        size = self._size_at.pop(start)
        del self._start_before[start + size]
        number = _bin_of(size)
        bin_ = self._bins[number]
        del bin_[start]
        if not bin_:
            self._filled ^= 1 << number
        self.total -= size
        return size
