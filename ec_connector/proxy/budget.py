# SPDX-License-Identifier: Apache-2.0
"""How much the router takes on at one time: requests, and bytes of their bodies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OverloadError(Exception):
    """No room for this request now; the text says what is used up."""


class Budget:
    """Counts requests that are under way and the bytes of their bodies."""

    def __init__(self, most_requests: int, most_bytes: int) -> None:
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self.requests = 0
        self.bytes = 0

    @contextmanager
    def request(self) -> Iterator[Share]:
        """A request's share, for as long as it takes.

        Raises:
            OverloadError: there are as many requests as there may be.
        """
        if self.requests >= self._most_requests:
            raise OverloadError(f"{self.requests} requests are under way, that is the limit")
        share = Share(self)
        self.requests += 1
        try:
            yield share
        finally:
            self.requests -= 1
            share.resize(0)

    def resize(self, old: int, new: int) -> None:
        """A share of ``old`` bytes becomes one of ``new``. Raises OverloadError."""
        if new > old and self.bytes - old + new > self._most_bytes:
            raise OverloadError(
                f"bodies of {self.bytes} bytes are under way, {new - old} more would exceed "
                f"{self._most_bytes}"
            )
        self.bytes += new - old


class Share:
    """What one request holds of the budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bytes = 0

    def resize(self, nbytes: int) -> None:
        """Hold so many bytes from now on. Raises OverloadError, and then holds what it did."""
        self._budget.resize(self._bytes, nbytes)
        self._bytes = nbytes
