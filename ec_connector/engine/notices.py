# SPDX-License-Identifier: Apache-2.0
"""Log lines that may come in floods: the first of a kind at once, the rest as a number."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

INTERVAL: Final = 10.0
"""Seconds between two lines of one kind."""


@dataclass(slots=True)
class Notices:
    """A rate limit per kind of line. ``logger`` takes the lines."""

    logger: logging.Logger
    _last: dict[str, float] = field(default_factory=dict)
    _held_back: dict[str, int] = field(default_factory=dict)

    def say(self, kind: str, now: float, text: str, *values: object, level: int) -> None:
        """Log, unless a line of this kind was logged a short while ago."""
        last = self._last.get(kind)
        if last is not None and now - last < INTERVAL:
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return
        self._last[kind] = now
        more = self._held_back.pop(kind, 0)
        if more:
            text = f"{text} ({more} more like this in {now - (last or 0.0):.0f} s)"
        self.logger.log(level, text, *values)
