# SPDX-License-Identifier: Apache-2.0
"""What is counted, by name: the one list that code, metrics and log lines share.

A tally travels from the scheduler to vLLM's API process as a plain dict: counts
by name, counts by name and reason, observations in seconds, and gauges, which
stand for the moment and are not added up. An item's identifier is never in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ec_connector.protocol.hint import OUTCOMES

COUNTS: Final[dict[str, str]] = {
    "encoded_items": "Items given to this engine's own encoder.",
    "unannounced_media_items": "Items that came with their media and without an announcement.",
    "fetched_items": "Items that came into the pool, or were in it, when a request needed them.",
    "fetched_bytes": "Bytes of these items.",
    "hit_items": "Fetched items that were in this engine's own pool.",
    "loaded_items": "Items copied from the pool into the encoder cache instead of encoded.",
    "loaded_bytes": "Bytes of these items.",
    "saved_items": "Items given room in the pool, to be copied there when encoded.",
    "saved_bytes": "Bytes of these items.",
    "announced_items": "Items announced to whoever asked for their encoding.",
    "save_failed_items": "Items whose copy into the pool failed.",
    "agent_restarts": "Times the agent had to be started again.",
}
"""Counters without labels, and what they mean."""

REASONED: Final[dict[str, str]] = {
    "fallback_items": "Items encoded here because what was announced could not be had.",
    "failed_requests": "Requests failed: an item could not be had and came without its media.",
    "ahead_items": "Items that a router named before an engine asked, by what became of them.",
    "unsaved_items": "Items encoded here that could not be saved and were not announced.",
}
"""Counters by reason, and what they mean."""

TIMES: Final[dict[str, str]] = {
    "fetch_time": "Seconds from asking for an item to having it in the pool.",
}
"""Observations in seconds, and what they mean."""

GAUGES: Final[dict[str, str]] = {
    "agent_up": "1 while this engine's agent runs.",
    "waiting_items": "Items that requests wait for.",
    "usage_ratio": "Part of the pool's blocks that hold items (0 to 1).",
    "pinned_blocks": "Blocks whose items are in use and cannot be evicted.",
}
"""Values of the moment, and what they mean."""

LINKED: Final[dict[str, tuple[str, str, str]]] = {
    "transfers": ("transfers", "outcome", "Transfers between agents that are over, each end's."),
    "bytes": ("transferred_bytes", "part", "Bytes of these transfers: headers and payload."),
    "seconds": (
        "transfer_time_seconds",
        "stage",
        "Seconds of these transfers by stage; packing runs beside the others.",
    ),
}
"""Counters by link, role and one label more, from the agent's books: what is summed there, the
counter's name, that label, and the meaning."""

MAX_OBSERVATIONS: Final = 1024


@dataclass(slots=True)
class Tally:
    """Counts since the last :meth:`take`."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    links: dict[str, dict[str, float]] = field(default_factory=dict)
    totals: dict[str, Counter[str]] = field(default_factory=dict)
    """``reasons`` since the start; a take leaves them."""
    _failed_before: int = 0
    _links_before: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    _ahead_before: dict[str, int] = field(default_factory=dict)

    def new_agent(self) -> None:
        """An agent serves whose own counts begin at zero."""
        self.gauges["agent_up"] = 1
        self._failed_before = 0
        self._links_before = {}
        self._ahead_before = {}

    def note_agent(
        self, values: Mapping[str, Any], links: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Take over what the agent says of its pool, of saves that failed, and of its links."""
        blocks = values.get("blocks", 0)
        if blocks:
            self.gauges["usage_ratio"] = 1 - values.get("blocks_free", 0) / blocks
        self.gauges["pinned_blocks"] = values.get("blocks_pinned", 0)
        self.gauges["agent_up"] = 1
        failed = int(values.get("save_failed", 0))
        if failed > self._failed_before:
            self.add("save_failed_items", failed - self._failed_before)
        self._failed_before = failed
        for name, sums in (links or {}).items():
            before = self._links_before.get(name, {})
            for label, number in sums.items():
                if number > before.get(label, 0):
                    more = self.links.setdefault(name, {})
                    more[label] = more.get(label, 0) + number - before.get(label, 0)
        self._links_before = links or {}
        for outcome in OUTCOMES:
            ended = int(values.get(f"ahead_{outcome}", 0))
            if ended > self._ahead_before.get(outcome, 0):
                self.add_reason("ahead_items", outcome, ended - self._ahead_before.get(outcome, 0))
            self._ahead_before[outcome] = ended

    def add(self, name: str, number: int = 1) -> None:
        """Count under one of ``COUNTS``."""
        self.counts[name] += number

    def add_reason(self, name: str, reason: str, number: int = 1) -> None:
        """Count under one of ``REASONED``."""
        self.reasons.setdefault(name, Counter())[reason] += number
        self.totals.setdefault(name, Counter())[reason] += number

    def observe(self, name: str, seconds: float) -> None:
        """Note one of ``TIMES``; what exceeds ``MAX_OBSERVATIONS`` between takes is dropped."""
        seen = self.times.setdefault(name, [])
        if len(seen) < MAX_OBSERVATIONS:
            seen.append(seconds)

    def take(self) -> dict[str, Any] | None:
        """Everything since the last call as a plain dict, or None if there is nothing."""
        if not (self.counts or self.reasons or self.times or self.gauges or self.links):
            return None
        data = {
            "counts": dict(self.counts),
            "reasons": {name: dict(found) for name, found in self.reasons.items()},
            "times": self.times,
            "gauges": self.gauges,
            "links": self.links,
        }
        self.counts, self.reasons, self.times, self.gauges = Counter(), {}, {}, {}
        self.links = {}
        return data


def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both tallies added up, as :meth:`Tally.take` returns them; ``other`` is the later one."""
    times = {
        name: [*one.get("times", {}).get(name, []), *other.get("times", {}).get(name, [])]
        for name in one.get("times", {}).keys() | other.get("times", {}).keys()
    }
    return {
        "counts": dict(Counter(one.get("counts", {})) + Counter(other.get("counts", {}))),
        "reasons": _added(one.get("reasons", {}), other.get("reasons", {})),
        "times": times,
        "gauges": one.get("gauges", {}) | other.get("gauges", {}),
        "links": _added(one.get("links", {}), other.get("links", {})),
    }


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: dict(Counter(one.get(name, {})) + Counter(other.get(name, {})))
        for name in one.keys() | other.keys()
    }
