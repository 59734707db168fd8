# SPDX-License-Identifier: Apache-2.0
"""Tickets: a producer's word, under a key of the fleet, that it announced an item.

A ticket is the HMAC-SHA256 (64 hex digits) of an item's identifier, address, size, element
type and shape. It stands in the announcement, which clients and routers carry and cannot
change, and goes back to the producer with the request. The same announcement has the same
ticket, on every day that its key is accepted.

What the peers *are* (model, weights ...) is not in it: each request says that in full, and
the producer names the factor that differs.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Sequence

from ec_connector.errors import ConfigError

MAX_TICKET_CHARS = 64
MAX_KEYS = 2
_KEY = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
_PURPOSE = "ec_connector ticket 1"
_PING = "ec_connector ping 1"


class Tickets:
    """Signs with the first key, and accepts what any of the keys signed.

    Args:
        keys: one, or two while keys are being changed.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = tuple(keys)

    @classmethod
    def parse(cls, text: str) -> Tickets:
        """From a key file's text: one or two lines of 64 hex digits, the first one signs.

        Raises:
            ConfigError: it is none. The text itself is not quoted.
        """
        lines = text.split()
        if not 0 < len(lines) <= MAX_KEYS or not all(map(_KEY.fullmatch, lines)):
            raise ConfigError(
                f"a ticket key file has one or {MAX_KEYS} lines of 64 hex digits each; "
                "make one with ec-connector keygen"
            )
        return cls([bytes.fromhex(line) for line in lines])

    def sign(
        self, key: str, host: str, port: int, nbytes: int, dtype: str, shape: Sequence[int]
    ) -> str:
        """The ticket of one item at one address."""
        return _mac(self._keys[0], _words(key, host, port, nbytes, dtype, shape))

    def verify(
        self,
        ticket: str,
        key: str,
        host: str,
        port: int,
        nbytes: int,
        dtype: str,
        shape: Sequence[int],
    ) -> bool:
        """Whether a producer of the fleet announced exactly this."""
        return self._signed(ticket, _words(key, host, port, nbytes, dtype, shape))

    def sign_ping(self, seq: int) -> str:
        """The ticket of one ping. It opens nothing but an answer to that ping."""
        return _mac(self._keys[0], _ping_words(seq))

    def verify_ping(self, ticket: str, seq: int) -> bool:
        """Whether somebody of the fleet pings."""
        return self._signed(ticket, _ping_words(seq))

    def _signed(self, ticket: str, words: bytes) -> bool:
        given = ticket.encode("utf-8", "surrogatepass")
        # All keys are tried, so that the time taken does not tell which one fits.
        fits = [hmac.compare_digest(given, _mac(one, words).encode()) for one in self._keys]
        return any(fits)


def _words(key: str, host: str, port: int, nbytes: int, dtype: str, shape: Sequence[int]) -> bytes:
    # JSON, so that no two different items have the same text.
    return json.dumps([_PURPOSE, key, host, port, nbytes, dtype, list(shape)]).encode("ascii")


def _ping_words(seq: int) -> bytes:
    return json.dumps([_PING, seq]).encode("ascii")


def _mac(key: bytes, words: bytes) -> str:
    return hmac.new(key, words, hashlib.sha256).hexdigest()
