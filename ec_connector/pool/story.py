# SPDX-License-Identifier: Apache-2.0
"""A short memory of what happened to each key, for people who look for a fault."""

from __future__ import annotations

from collections import OrderedDict, deque

_EVENTS_PER_KEY = 16
_KEYS = 4096


class Stories:
    """The last 16 events of each of the 4096 keys that something happened to last."""

    def __init__(self) -> None:
        self._events: OrderedDict[str, deque[tuple[float, int, str, str]]] = OrderedDict()

    def add(self, key: str, now: float, generation: int, event: str, detail: str = "") -> None:
        """Note one event; ``detail`` is for whom or why."""
        events = self._events.get(key)
        if events is None:
            events = self._events[key] = deque(maxlen=_EVENTS_PER_KEY)
            if len(self._events) > _KEYS:
                self._events.popitem(last=False)
        else:
            self._events.move_to_end(key)
        events.append((now, generation, event, detail))

    def of(self, key: str) -> list[str]:
        """The key's events as text, oldest first; empty if nothing is remembered."""
        return [
            f"{now:.6f} generation {generation}: {event}" + (f" ({detail})" if detail else "")
            for now, generation, event, detail in self._events.get(key, ())
        ]
