# SPDX-License-Identifier: Apache-2.0
"""Which pool regions the workers are told of, and which they are sure to have mapped.

A region dies with its agent for whoever has not mapped it yet. So the current
one is named in every step, long before anything is loaded from it.
"""

from __future__ import annotations

from typing import Final

from ec_connector.protocol.messages import RegionRef

_KEPT: Final = 4


class Regions:
    """The regions of this engine's agents, the latest last."""

    def __init__(self) -> None:
        self._known: dict[str, RegionRef] = {}
        self._shown_at: dict[str, int] = {}

    def add(self, ref: RegionRef) -> None:
        """An agent made this region."""
        self._known.pop(ref.token, None)
        self._known[ref.token] = ref
        while len(self._known) > _KEPT:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._shown_at.pop(oldest, None)

    def show(self, tokens: set[str], step: int, *, delivered: bool) -> list[RegionRef]:
        """The regions that a step names."""
        if delivered:
            for token in tokens & self._known.keys():
                self._shown_at.setdefault(token, step)
        return [ref for token, ref in self._known.items() if token in tokens]

    def mapped(self, returned: int) -> set[str]:
        """Tokens of regions that every worker has seen in a step up to ``returned``."""
        return {token for token, step in self._shown_at.items() if step <= returned}
