# SPDX-License-Identifier: Apache-2.0
"""State machines as tables: what can happen in which state, and what comes of it.

The tables stand with their machines: ``ENTRY`` (pool), ``GRANT`` (producer), ``FETCH``
(consumer), ``LIFE`` (an engine's agent), ``CIRCUIT`` (a server behind the
router). ``docs/state-machines.md`` is drawn from them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ec_connector.errors import InternalError

S = TypeVar("S", bound=enum.Enum)


@dataclass(frozen=True)
class Table(Generic[S]):
    """Legal moves of one kind of thing.

    Attributes:
        name: of the thing.
        start: its first state.
        moves: for each state, each event that can happen there and the state after it.
    """

    name: str
    start: S
    moves: Mapping[S, Mapping[str, S]]

    def after(self, state: S, event: str, key: str, told: Callable[[], str] = str) -> S:
        """The state after an event.

        Raises:
            InternalError: it cannot happen there. The text names the thing, its state and the
                event, says what can happen, and ends with what ``told`` knows of its past.
        """
        found = self.moves.get(state, {}).get(event)
        if found is None:
            possible = ", ".join(map(repr, self.moves.get(state, ()))) or "nothing"
            raise InternalError(
                f"{self.name} {key!r}: {event!r} cannot happen in state {state.value!r}, "
                f"only {possible}\n{told()}".rstrip()
            )
        return found
