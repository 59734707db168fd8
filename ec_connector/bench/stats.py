# SPDX-License-Identifier: Apache-2.0
"""What a list of durations comes down to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """Durations in seconds: how many there were, and where they lie.

    ``p99`` of fewer than 100 is the longest.
    """

    n: int
    low: float
    p25: float
    median: float
    p75: float
    p99: float
    high: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of the ordered values do not exceed."""
    if not ordered:
        raise ValueError("no values")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the middle two. Raises ValueError without values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def summarize(seconds: Sequence[float]) -> Summary:
    """The summary of at least one duration."""
    ordered = sorted(seconds)
    return Summary(
        n=len(ordered),
        low=quantile(ordered, 0),
        p25=quantile(ordered, 0.25),
        median=median(ordered),
        p75=quantile(ordered, 0.75),
        p99=quantile(ordered, 0.99),
        high=quantile(ordered, 1),
    )
