# SPDX-License-Identifier: Apache-2.0
"""What was delivered to which client, pinned until the client releases it or is gone."""

from __future__ import annotations

from collections import defaultdict

from ec_connector.errors import InternalError
from ec_connector.pool.blocks import BlockPool, Entry


class Delivered:
    """Pins of clients on items of the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # A key can stand for several generations: one delivered before its key got new content.
        self._of: defaultdict[bytes, dict[str, list[Entry]]] = defaultdict(dict)

    def add(self, client: bytes, entry: Entry, now: float) -> None:
        """Pin an item for a client; a second time is as good as once."""
        self._pool.pin(entry.key, _pin(client), None, now)
        entries = self._of[client].setdefault(entry.key, [])
        if entry not in entries:
            entries.append(entry)

    def release(self, client: bytes, key: str, now: float) -> None:
        """A client needs an item no longer, whatever content its key stood for."""
        held = self._of.get(client)
        if held is None:
            return
        for entry in held.pop(key, ()):
            self._pool.unpin(entry.generation, _pin(client), now)
        if not held:
            del self._of[client]

    def keys(self, client: bytes) -> list[str]:
        """What a client holds."""
        return list(self._of.get(client, ()))

    def validate(self) -> None:
        """Raise InternalError where an item is held without its pin."""
        for client, held in self._of.items():
            for key, entries in held.items():
                if any(_pin(client) not in entry.pins for entry in entries):
                    raise InternalError(f"{key!r} is delivered to {client!r} without a pin")


def _pin(client: bytes) -> str:
    return f"client/{client.hex()}"
