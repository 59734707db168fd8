# SPDX-License-Identifier: Apache-2.0
"""What was delivered to which client, pinned until the client releases it or is gone."""

from __future__ import annotations

from collections import defaultdict

from ec_connector.errors import InternalError
from ec_connector.pool.blocks import BlockPool, Entry
from ec_connector.protocol.account import DELIVERED, Account


class Delivered:
    """Pins of clients on items of the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # A key can stand for several generations: one delivered before its key got new content.
        self._of: defaultdict[bytes, dict[str, list[Entry]]] = defaultdict(dict)
        self._accounts: defaultdict[tuple[bytes, str], list[Account]] = defaultdict(list)

    def add(self, client: bytes, entry: Entry, now: float) -> None:
        """Pin an item for a client; a second time is as good as once."""
        self._pool.pin(entry.key, _pin(client), None, now)
        entries = self._of[client].setdefault(entry.key, [])
        if entry not in entries:
            entries.append(entry)

    def charge(self, account: Account, clients: list[bytes]) -> None:
        """A transfer whose item these clients got: it is over with the first that has loaded it."""
        for client in clients:
            self._accounts[client, account.item].append(account)

    def release(self, client: bytes, key: str, now: float) -> list[Account]:
        """A client needs an item no longer, whatever content its key stood for.

        Returns the transfers that are over with it.
        """
        over = self.loaded(client, key)
        held = self._of.get(client)
        if held is None:
            return over
        for entry in held.pop(key, ()):
            self._pool.unpin(entry.generation, _pin(client), now)
        if not held:
            del self._of[client]
        return over

    def loaded(self, client: bytes, key: str) -> list[Account]:
        """A client has copied an item out of the pool: the transfers that are over with it."""
        over = [one for one in self._accounts.pop((client, key), ()) if not one.outcome]
        for account in over:
            account.outcome = DELIVERED
        return over

    def keys(self, client: bytes) -> list[str]:
        """What a client holds."""
        return list(self._of.get(client, ()))

    def validate(self) -> None:
        """Raise InternalError where an item is held without its pin, or charged to nobody."""
        for client, key in self._accounts:
            if key not in self._of.get(client, ()):
                raise InternalError(f"a transfer of {key!r} is charged to {client!r} without it")
        for client, held in self._of.items():
            for key, entries in held.items():
                if any(_pin(client) not in entry.pins for entry in entries):
                    raise InternalError(f"{key!r} is delivered to {client!r} without a pin")


def _pin(client: bytes) -> str:
    return f"client/{client.hex()}"
