# SPDX-License-Identifier: Apache-2.0
"""Which server gets what: the same content the same one, unless it has much more than the others.

Rendezvous hashing: each server's score for a key depends on nothing but the two, so that one
that comes or goes moves only the keys that it gains or had. Bounded load: a server that has
``SHARE`` times the mean passes further ones to the next in the key's order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

SHARE = 1.25
FREE = 4
"""Items that any server may have: encoders take several at once."""


class Loaded(Protocol):
    """Something with a lasting name that carries load."""

    @property
    def name(self) -> str: ...
    @property
    def load(self) -> int: ...
    @property
    def taken(self) -> int: ...


T = TypeVar("T", bound=Loaded)


def by_key(key: str, targets: Sequence[T]) -> T:
    """The one for this key; ``targets`` must not be empty."""
    total = sum(target.load for target in targets) + 1
    most = max(FREE, math.ceil(SHARE * total / len(targets)))
    ordered = sorted(targets, key=lambda target: _score(key, target.name), reverse=True)
    # One of them has no more than the mean, and so less than `most`.
    return next(target for target in ordered if target.load < most)


def least_loaded(targets: Sequence[T]) -> T:
    """The one that has least now, and of these had least ever; must not be empty."""
    return min(targets, key=lambda target: (target.load, target.taken))


def _score(key: str, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8, key=_short(key)).digest()


def _short(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32).digest()
