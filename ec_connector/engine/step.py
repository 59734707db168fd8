# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers with every engine step, and what they tell back.

Plain data, pickled by vLLM between its processes, and independent of vLLM
itself: the connector declares both kinds to vLLM's abstract base classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ec_connector.protocol.messages import RegionRef


@dataclass(slots=True)
class Placement:
    """Where the rows of one item lie in the pool.

    ``extents`` are ``(first block, blocks)`` in order, ``nbytes`` the bytes of
    the rows, ``shape`` is ``(rows, width)``, ``dtype`` torch's name without
    ``torch.``. ``token`` names the region, ``generation`` the entry.
    """

    key: str
    generation: int
    extents: list[tuple[int, int]]
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    token: str


@dataclass(slots=True)
class StepMetadata:
    """The orders of one engine step.

    Attributes:
        step: number of the step, counted by the scheduler side from 1.
        endpoint: where this engine's agent is reached; empty while it is down.
        regions: the pool regions that orders refer to, and the current one.
        saves: rows to copy into the pool once they are encoded.
        republish: like ``saves``, for items that the engine encoded in an
            earlier step and that the pool has lost.
        loads: rows to copy out of the pool into the encoder cache.
        freed: items that left the encoder cache on the scheduler's word.
        close_step: reservations up to this step end with this step; 0: none.
        resets: how often the encoder cache was emptied, as far as the scheduler side knows.
            What it had loaded before is of other weights.
    """

    step: int
    endpoint: str = ""
    regions: list[RegionRef] = field(default_factory=list)
    saves: dict[str, Placement] = field(default_factory=dict)
    republish: dict[str, Placement] = field(default_factory=dict)
    loads: dict[str, Placement] = field(default_factory=dict)
    freed: list[str] = field(default_factory=list)
    close_step: int = 0
    resets: int = 0


@dataclass(slots=True)
class WorkerReport:
    """What the workers of a step found; only made when there is something to say.

    Attributes:
        failed_loads: items whose rows could not be had although the scheduler
            promised them, with the reason; zeros stand in their place.
        resets: how often the encoder cache was found emptied, as vLLM does when
            weights are reloaded; 0 when the scheduler side knows already.
    """

    failed_loads: dict[str, str] = field(default_factory=dict)
    resets: int = 0

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """The findings of both; what failed on one rank has failed."""
        return WorkerReport(other.failed_loads | self.failed_loads, max(self.resets, other.resets))
