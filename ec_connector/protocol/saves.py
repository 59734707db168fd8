# SPDX-License-Identifier: Apache-2.0
"""How this engine's own encoder outputs get into the pool.

Rules:

1. Room is reserved when the scheduler decides to encode, before the worker runs:
   an item that will not fit is known, and not announced, from the start.
2. Reserving is repeatable: an item that is here or on its way costs nothing.
3. Blocks of a reservation are reused only after its writer said so (``Saved``,
   ``SaveFailed``, ``StepDone`` of that step or a later one) or is dead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ec_connector.errors import PoolError
from ec_connector.pool.blocks import BlockPool
from ec_connector.protocol.local import (
    Reserve,
    Reserved,
    ReservedItem,
    ReserveItem,
    Saved,
    SaveFailed,
)
from ec_connector.protocol.messages import MAX_HASH_CHARS, MAX_RANK


@dataclass(frozen=True, slots=True)
class Lost:
    """A reservation that will not become an item, and why (empty: given up)."""

    key: str
    message: str = ""
    traceback: str = ""


class SaveDesk:
    """Reservations and saves of one engine. ``owner`` is whoever reserved."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.counts: Counter[str] = Counter()

    def reserve(self, owner: bytes, message: Reserve, now: float) -> Reserved:
        """Room for what a step will save."""
        items = [self._reserve_one(owner, message, item, now) for item in message.items]
        return Reserved(message.seq, items)

    def _reserve_one(
        self, owner: bytes, message: Reserve, item: ReserveItem, now: float
    ) -> ReservedItem:
        shape = tuple(item.shape)
        if len(item.key) > MAX_HASH_CHARS:
            return ReservedItem(item.key, refused=f"a key of over {MAX_HASH_CHARS} characters")
        # What no message to a consumer could say must not be promised either.
        if item.nbytes < 0 or len(shape) > MAX_RANK or min(shape, default=0) < 0:
            text = f"{item.nbytes} bytes of shape {item.shape[: MAX_RANK + 1]} are no item"
            return ReservedItem(item.key, refused=text)
        entry = self._pool.get(item.key)
        if entry is not None:
            same = (entry.nbytes, entry.dtype, entry.shape) == (item.nbytes, item.dtype, shape)
            if same and not message.replace:
                self._pool.touch(item.key, now)
                return ReservedItem(item.key, entry.generation, held=True)
            if entry.saving:
                return ReservedItem(item.key, refused="being saved already, and not as the same")
            self._pool.drop(item.key)  # the key now stands for other content
        try:
            entry = self._pool.reserve(
                item.key, item.nbytes, item.dtype, shape, owner=owner, step=message.step, now=now
            )
        except PoolError as error:
            self.counts["reserve_refused"] += 1
            return ReservedItem(item.key, refused=str(error))
        return ReservedItem(item.key, entry.generation, list(entry.extents))

    def saved(self, message: Saved, now: float) -> list[str]:
        """Rows are in place. Returns the keys that became ready."""
        ready = []
        for key, generation in message.items:
            if self._pool.commit(key, generation, now) is not None:
                self.counts["saved"] += 1
                ready.append(key)
            else:
                self.counts["saved_too_late"] += 1
        return ready

    def failed(self, message: SaveFailed) -> list[Lost]:
        """A save failed."""
        self.counts["save_failed"] += 1
        current = self._pool.get(message.key)
        was_current = current is not None and current.generation == message.generation
        self._pool.abandon(message.key, message.generation)
        if not was_current:
            return []
        return [Lost(message.key, message.message or "the save failed", message.traceback)]

    def step_done(self, owner: bytes, step: int) -> list[Lost]:
        """The writer is past this step: free what it left unsaved."""
        return self._given_up([entry.key for entry in self._pool.abandon_steps(owner, step)])

    def owner_gone(self, owner: bytes) -> list[Lost]:
        """Whoever reserved is dead, and the engine's workers with it."""
        return self._given_up([entry.key for entry in self._pool.abandon_owner(owner)])

    def _given_up(self, keys: list[str]) -> list[Lost]:
        self.counts["saves_given_up"] += len(keys)
        return [Lost(key) for key in keys if self._pool.get(key) is None]
