# SPDX-License-Identifier: Apache-2.0
"""Says and counts how items ended: no fallback is silent, and no flood fills the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ec_connector.engine.claims import Outcome
from ec_connector.engine.notices import Notices
from ec_connector.engine.offers import StepSaves
from ec_connector.engine.tally import Tally


class Words:
    """Log lines and counts of one engine.

    Args:
        logger: takes the lines.
        tally: takes the counts.
        clock: seconds, monotonic.
    """

    def __init__(self, logger: logging.Logger, tally: Tally, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._tally = tally
        self._clock = clock
        self._notices = Notices(logger)

    def outcome(self, outcome: Outcome) -> None:
        """An item could not be had: the request fails, or the item is encoded here."""
        if outcome.expected:
            self._tally.add("unannounced_media_items")
            return
        values = (
            outcome.request_id,
            outcome.key,
            outcome.peer or "none",
            outcome.reason,
            outcome.message,
        )
        if not outcome.local:
            self._tally.add_reason("failed_requests", outcome.reason)
            self._logger.error(
                "Request %s fails: its item %s cannot be had from peer %s, "
                "reason %s: %s; and it came without its media",
                *values,
            )
            return
        self._tally.add_reason("fallback_items", outcome.reason)
        self._notices.say(
            f"fallback {outcome.reason}",
            self._clock(),
            "Request %s encodes its item %s here: it cannot be had from peer %s, reason %s: %s",
            *values,
            level=logging.WARNING,
        )

    def saves(self, saves: StepSaves) -> None:
        """What a step saves, and what it could not."""
        for place in (*saves.saves.values(), *saves.republish.values()):
            self._tally.add("saved_items")
            self._tally.add("saved_bytes", place.nbytes)
        for key, (reason, words) in saves.refused.items():
            self._tally.add_reason("unsaved_items", reason)
            self._notices.say(
                f"unsaved {reason}",
                self._clock(),
                "Item %s is encoded but neither saved nor announced: %s",
                key,
                f"{reason}: {words}" if words else reason,
                level=logging.WARNING,
            )
