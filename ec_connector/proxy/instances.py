# SPDX-License-Identifier: Apache-2.0
"""The servers behind the router, by what they do."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ec_connector.proxy.circuit import Circuit, State


class Role(enum.StrEnum):
    """What a server does for a request."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)
class Target:
    """Where a request can be sent: a server, or one data-parallel rank of it.

    ``load``: requests (of an encoder: items) that it has now. ``taken``: that it ever had.
    """

    instance: Instance
    rank: int | None
    load: int = 0
    taken: int = 0

    @property
    def name(self) -> str:
        return self.instance.url if self.rank is None else f"{self.instance.url}#{self.rank}"

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Counts a request that will be sent there as if it had it already."""
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1

    @contextmanager
    def carrying(self, amount: int = 1) -> Iterator[None]:
        """Counts what it has while it has it."""
        self.load += amount
        self.taken += amount
        try:
            yield
        finally:
            self.load -= amount


@dataclass(eq=False)
class Instance:
    """A server. ``ranks``: its data-parallel ranks, each addressed by a header; 1 for none."""

    role: Role
    url: str
    ranks: int = 1
    circuit: Circuit = field(init=False)
    targets: tuple[Target, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.circuit = Circuit(self.url)
        ranks = [None] if self.ranks == 1 else range(self.ranks)
        self.targets = tuple(Target(self, rank) for rank in ranks)

    @property
    def load(self) -> int:
        """Requests or items that all its ranks have now."""
        return sum(target.load for target in self.targets)

    @property
    def usable(self) -> bool:
        """Whether it may get another request now."""
        state = self.circuit.state
        return state is State.SERVING or (state is State.TRIAL and not self.load)


class Instances:
    """All servers. One may come and go while requests are under way."""

    def __init__(self) -> None:
        self._known: dict[tuple[Role, str], Instance] = {}

    def add(self, role: Role, url: str, ranks: int = 1) -> Instance:
        """A server from now on; one that is known already stays as it is, but for its ranks."""
        known = self._known.get((role, url))
        if known is not None and known.ranks == ranks:
            return known
        self._known[role, url] = Instance(role, url, ranks)
        return self._known[role, url]

    def remove(self, role: Role, url: str) -> bool:
        """Whether it was there. Requests that it has go on."""
        instance = self._known.pop((role, url), None)
        if instance is not None:
            instance.circuit.removed()
        return instance is not None

    def all(self) -> list[Instance]:
        """Every server."""
        return list(self._known.values())

    def of(self, role: Role) -> list[Instance]:
        """Those of a role."""
        return [instance for instance in self._known.values() if instance.role is role]

    def targets(self, role: Role, *, but: Instance | None = None) -> list[Target]:
        """Where a request of this role may go now, and not to ``but``."""
        return [
            target
            for instance in self.of(role)
            if instance.usable and instance is not but
            for target in instance.targets
        ]

    def described(self) -> list[dict[str, Any]]:
        """All of them, for people."""
        return [
            {
                "role": str(instance.role),
                "url": instance.url,
                "ranks": instance.ranks,
                "state": instance.circuit.state.name.lower(),
                "load": instance.load,
                "failures_in_a_row": instance.circuit.failures,
            }
            for instance in self.all()
        ]
