# SPDX-License-Identifier: Apache-2.0
"""Free runs of blocks."""

from __future__ import annotations

import random

import pytest

from ec_connector.errors import InternalError
from ec_connector.pool.extents import FreeExtents, _bin_of


def test_new_is_one_run() -> None:
    """At first everything is free, as one run."""
    free = FreeExtents(10)
    assert free.runs() == [(0, 10)]
    assert (free.total, free.largest()) == (10, 10)


def test_take_run_cuts_what_it_needs() -> None:
    """A run is cut from a longer one and the rest stays free."""
    free = FreeExtents(10)
    assert free.take_run(4) == 0
    assert free.runs() == [(4, 6)]
    assert free.take_run(7) is None
    assert free.take_run(6) == 4
    assert (free.total, free.largest(), free.runs()) == (0, 0, [])


def test_give_joins_both_neighbours() -> None:
    """A run given back between two free ones makes one run."""
    free = FreeExtents(9)
    for _ in range(3):
        free.take_run(3)
    free.give(0, 3)
    free.give(6, 3)
    assert free.runs() == [(0, 3), (6, 3)]
    assert free.run_after_giving(3, 3) == 9
    free.give(3, 3)
    assert free.runs() == [(0, 9)]
    free.validate()


def test_closest_fit_spares_the_long_run() -> None:
    """Of two runs that fit, the one of the right size is taken."""
    free = FreeExtents(100)
    free.take_run(100)
    free.give(0, 60)
    free.give(70, 5)
    assert free.take_run(5) == 70
    assert free.runs() == [(0, 60)]


def test_fit_in_a_mixed_bin() -> None:
    """Among runs that share a bin a long enough one is found."""
    free = FreeExtents(1000)
    free.take_run(1000)
    free.give(0, 64)
    free.give(100, 71)  # the same bin as 64
    assert free.take_run(70) == 100


@pytest.mark.parametrize("need", [17, 37, 500])
def test_longer_runs_are_not_cut_when_a_close_one_is_free(need: int) -> None:
    """A run an eighth longer is preferred to one of nearly twice the size."""
    free = FreeExtents(4000)
    free.take_run(4000)
    free.give(0, 2 * need - 3)
    free.give(2000, need + need // 8 + 1)
    assert free.take_run(need) == 2000


def test_a_run_behind_many_shorter_ones() -> None:
    """A fitting run that is not seen in its bin is still part of what can be taken."""
    free = FreeExtents(2000)
    free.take_run(2000)
    for number in range(9):
        free.give(100 * number, 64)
    free.give(1000, 71)
    assert free.take_run(70) is None
    taken = free.take(70, 16)
    assert taken is not None
    assert sum(count for _, count in taken) == 70


def test_no_blocks() -> None:
    """Nothing can be taken of nothing."""
    free = FreeExtents(0)
    assert free.take_run(1) is None
    assert free.take(1, 16) is None
    assert free.largest() == 0


def test_take_in_pieces() -> None:
    """Without one long run several are taken, and no more than allowed."""
    free = FreeExtents(20)
    free.take_run(20)
    for start in (0, 4, 8, 12):
        free.give(start, 2)
    assert free.take(7, 3) is None
    assert free.total == 8
    assert free.take(9, 9) is None
    taken = free.take(7, 4)
    assert taken is not None
    assert sum(count for _, count in taken) == 7
    assert taken == sorted(taken)
    assert free.total == 1
    free.validate()


def test_last_piece_is_a_close_fit() -> None:
    """The last piece does not cut a long run when a short one will do."""
    free = FreeExtents(100)
    free.take_run(100)
    free.give(0, 12)
    free.give(20, 10)
    free.give(40, 3)
    assert free.take(15, 4) == [(0, 12), (40, 3)]
    assert free.runs() == [(20, 10)]


@pytest.mark.parametrize("fault", ["size", "end", "bin", "stray", "total", "bitmap", "touching"])
def test_validate_notices(fault: str) -> None:
    """Each index that is spoilt is noticed."""
    free = FreeExtents(50)
    free.take_run(10)
    if fault == "size":
        free._size_at[10] = 0
    elif fault == "end":
        free._start_before[50] = 11
    elif fault == "bin":
        free._bins.clear()
    elif fault == "stray":
        free._bins[_bin_of(40)][7] = None
    elif fault == "total":
        free.total += 1
    elif fault == "bitmap":
        free._filled |= 1
    else:
        free._insert(8, 2)
    with pytest.raises(InternalError):
        free.validate()


@pytest.mark.parametrize("seed", range(5))
def test_random_walk_against_a_set(seed: int) -> None:
    """Over random takes and gives the free blocks are those of a plain set."""
    dice = random.Random(seed)
    free, model, taken = FreeExtents(300), set(range(300)), []
    for _ in range(400):
        if taken and dice.random() < 0.5:
            start, count = taken.pop(dice.randrange(len(taken)))
            free.give(start, count)
            model |= set(range(start, start + count))
            continue
        need = dice.randrange(1, 60)
        one = free.take_run(need)
        pieces = [(one, need)] if one is not None else free.take(need, 300)
        assert (pieces is None) == (len(model) < need)
        for start, count in pieces or ():
            blocks = set(range(start, start + count))
            assert blocks <= model
            model -= blocks
            taken.append((start, count))
        free.validate()
        assert {b for start, count in free.runs() for b in range(start, start + count)} == model
