# SPDX-License-Identifier: Apache-2.0
"""What :class:`~ec_connector.engine.intake.Intake` keeps: wishes, their holders, their ends."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from ec_connector.dtypes import lookup
from ec_connector.engine.step import Placement
from ec_connector.protocol.local import Ready


@dataclass(frozen=True, slots=True)
class Source:
    """Where an announcement says an item can be had, and what it is there."""

    host: str
    port: int
    nbytes: int
    shape: tuple[int, ...]
    ticket: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Want:
    """One item as one request needs it.

    ``fault`` is the counted reason, ``fault_text`` the words, of an
    announcement that cannot be used. ``ask`` is False where neither an
    announcement nor the past gives a reason to look for the item: it is
    encoded without a word.
    """

    key: str
    rows: int
    modality: str
    has_media: bool
    source: Source | None = None
    fault: str = ""
    fault_text: str = ""
    ask: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """An item that could not be had: ``local`` tells whether it is encoded here instead.

    ``expected``: nobody had announced it, so encoding it is no fallback.
    """

    request_id: str
    key: str
    peer: str
    reason: str
    message: str
    local: bool
    expected: bool = False


@dataclass(slots=True)
class Claim:
    """What one request needs, and how far each item has come.

    ``covered``: every item that ends after this prompt position, of the first
    ``count``, is settled or waited for. ``visited`` is the producer side's mark.
    """

    request_id: str
    covered: int = sys.maxsize
    count: int = 0
    visited: bool = False
    wants: dict[str, Want] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)
    failed: bool = False


@dataclass(slots=True)
class Item:
    """One item in the pool or on its way: who needs it, by when, and what a step loads.

    ``holders`` maps a request to its wish and its deadline. ``busy_until`` is the
    last step whose workers were told to load it.
    """

    key: str
    source: Source | None
    rows: int
    asked_at: float
    holders: dict[str, tuple[Want, float]] = field(default_factory=dict)
    placement: Placement | None = None
    busy_until: int = 0


def fault_of(answer: Ready, rows: int, dtype: str) -> str:
    """What is wrong with what arrived, "" if it is ``rows`` rows of ``dtype``."""
    if len(answer.shape) != 2 or answer.shape[0] != rows:
        return f"it has shape {answer.shape}, but {rows} rows are expected"
    if answer.dtype != dtype:
        return f"its dtype is {answer.dtype}, but this model's is {dtype}"
    if answer.nbytes != rows * answer.shape[1] * lookup(dtype).itemsize:
        return f"{answer.nbytes} bytes cannot be {answer.shape} of {dtype}"
    return ""
