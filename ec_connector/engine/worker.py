# SPDX-License-Identifier: Apache-2.0
"""The connector in a worker process: copies rows in and out of the pool as the step orders.

It asks nobody anything: where to write and read stands in the step's metadata.
Nothing here raises into the model runner. A save that fails is reported to the
agent, a load that fails leaves zeros of the right shape (a missing entry would
end the engine) and is reported to the scheduler, which fails the requests.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import torch

from ec_connector.client import AgentClient
from ec_connector.engine._compat import RankFacts, rank_facts, waiting_allowed, worker_device
from ec_connector.engine.device import Device, device_for
from ec_connector.engine.step import Placement, StepMetadata, WorkerReport
from ec_connector.errors import RegionError
from ec_connector.pool.region import Region
from ec_connector.protocol.local import DropAll, Refused, Saved, SaveFailed, StepDone, ToAgent
from ec_connector.protocol.messages import RegionRef

logger = logging.getLogger("vllm.ec_connector.worker")

_REGIONS_KEPT: Final = 2


class Client(Protocol):
    """What is used of :class:`ec_connector.client.AgentClient`."""

    endpoint: str

    def send(self, message: ToAgent) -> bool: ...
    def receive(self, timeout: float = 0.0) -> list[Any]: ...
    def close(self) -> None: ...


class WorkerSide:
    """One rank's worker half.

    Args:
        facts: what this rank is.
        device: how rows are copied.
        connect: makes a connection to the agent at an endpoint.
        open_region: maps a region.
    """

    def __init__(
        self,
        facts: RankFacts,
        device: Device,
        connect: Callable[[str, str], Client] = AgentClient,
        open_region: Callable[..., Region] = Region.open,
    ) -> None:
        self._facts = facts
        self._device = device
        self._connect = connect
        self._open_region = open_region
        self._dtype: torch.dtype = getattr(torch, facts.dtype)
        self._regions: dict[str, Region] = {}
        self._unopened: dict[str, str] = {}
        self._client: Client | None = None  # used by the actions of Device.later alone
        self._cache: dict[str, torch.Tensor] = {}
        self._known: set[str] = set()
        self._stand_ins: set[str] = set()
        self._prepared = 0
        self._resets = 0
        self._saved: set[str] = set()
        self._unchecked: list[Placement] = []
        self._report = WorkerReport()

    @classmethod
    def of(cls, vllm_config: Any) -> WorkerSide:
        """For this process, which must be one of vLLM's workers."""
        return cls(rank_facts(vllm_config), device_for(worker_device(), waiting_allowed))

    # ── hooks, in the order of a step ────────────────────────────────────────

    def start_save(self, cache: dict[str, torch.Tensor], step: StepMetadata) -> None:
        """Publish again what an earlier step encoded and the pool has lost."""
        self._prepare(cache, step)
        for key, place in step.republish.items():
            rows = cache.get(key)
            if rows is not None and key not in self._stand_ins:
                self._save(place, rows, step)

    def start_load(self, cache: dict[str, torch.Tensor], step: StepMetadata) -> None:
        """Put every promised item into the encoder cache."""
        self._prepare(cache, step)
        for key, place in step.loads.items():
            if key in cache and key not in self._stand_ins:
                continue
            if step.resets < self._resets:
                # Chosen before the scheduler side knew, so perhaps of the weights of before.
                self._stand_in(cache, place, "the encoder cache was emptied meanwhile")
                continue
            try:
                cache[key] = self._load(place)
                self._stand_ins.discard(key)
            except Exception as error:
                self._stand_in(cache, place, f"{type(error).__name__}: {error}")

    def save(self, cache: dict[str, torch.Tensor], key: str, step: StepMetadata) -> None:
        """An item was encoded."""
        self._stand_ins.discard(key)
        place = step.saves.get(key)
        if place is not None:
            self._save(place, cache[key], step)

    def finish(self, step: StepMetadata) -> None:
        """The step's work is queued, or done."""
        for key, place in step.saves.items():
            rows = self._cache.get(key)
            if key not in self._saved and rows is not None:
                self._save(place, rows, step)
        self._saved.clear()
        if step.close_step and self._saves_here:
            self._post(step.endpoint, StepDone(step.close_step))
        self._device.finish_step()
        unchecked, self._unchecked = self._unchecked, []
        for place in unchecked:
            if fault := self._torn(place):
                self._stand_in(self._cache, place, fault)
        self._known = set(self._cache)

    def report(self) -> WorkerReport | None:
        """What the scheduler must know of this step, if anything."""
        if not self._report.failed_loads and not self._report.resets:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def close(self) -> None:
        """Finish what is under way and let everything go. Idempotent."""
        self._device.close()
        if self._client is not None:
            self._client.close()
            self._client = None
        for region in self._regions.values():
            region.close()
        self._regions.clear()

    # ── inside ───────────────────────────────────────────────────────────────

    @property
    def _saves_here(self) -> bool:
        return self._facts.is_producer and self._facts.leads

    def _prepare(self, cache: dict[str, torch.Tensor], step: StepMetadata) -> None:
        """Once a step: notice a reset, map new regions, drop old ones."""
        if self._prepared == step.step:
            return
        self._prepared = step.step
        self._cache = cache
        self._stand_ins.difference_update(step.freed)
        vanished = self._known.difference(step.freed, cache)
        if vanished:
            # vLLM empties the cache when weights change, and tells connectors nothing.
            logger.info("The encoder cache was emptied: %d items are gone", len(vanished))
            self._known.clear()
            self._stand_ins.clear()
            self._resets += 1
            if step.resets < self._resets and self._facts.leads and step.endpoint:
                self._post(step.endpoint, DropAll())
        # Said until it is known: what is found in one step is acted on in a later one.
        self._report.resets = self._resets if step.resets < self._resets else 0
        self._resets = max(self._resets, step.resets)  # an empty cache does not show them
        for ref in step.regions:
            self._map(ref)
        named = {ref.token for ref in step.regions}
        spare = [token for token in self._regions if token not in named]
        for token in spare[: max(0, len(self._regions) - _REGIONS_KEPT)]:
            region = self._regions.pop(token)
            self._device.forget(region)
            region.close()

    def _map(self, ref: RegionRef) -> None:
        if ref.token in self._regions:
            return
        try:
            region = self._open_region(ref, writable=self._saves_here or self._device.pins)
            self._device.open(region)
        except RegionError as error:
            if self._unopened.get(ref.token) != str(error):
                logger.error("The pool's memory cannot be mapped: %s", error)
            self._unopened = {ref.token: str(error)}
        else:
            self._unopened.pop(ref.token, None)
            self._regions[ref.token] = region

    def _region(self, place: Placement) -> Region:
        region = self._regions.get(place.token)
        if region is None:
            raise RegionError(self._unopened.get(place.token, "its region is not mapped here"))
        return region

    def _load(self, place: Placement) -> torch.Tensor:
        pieces = self._region(place).views(place.extents, place.nbytes)
        rows = self._device.load(pieces, place.shape, self._dtype)
        if self._device.deferred:
            self._unchecked.append(place)
        elif fault := self._torn(place):
            raise RegionError(fault)
        return rows

    def _torn(self, place: Placement) -> str:
        """Whether the blocks were given to another item while they were read."""
        found = self._region(place).generation(place.extents[0][0])
        if found == place.generation:
            return ""
        return f"its blocks hold generation {found}, not {place.generation} as promised"

    def _stand_in(self, cache: dict[str, torch.Tensor], place: Placement, fault: str) -> None:
        logger.error("Item %s cannot be loaded: %s", place.key, fault)
        cache[place.key] = self._device.zeros(place.shape, self._dtype)
        self._stand_ins.add(place.key)
        self._report.failed_loads[place.key] = fault

    def _save(self, place: Placement, rows: torch.Tensor, step: StepMetadata) -> None:
        if not self._saves_here:
            return
        self._saved.add(place.key)
        failed = partial(self._save_failed, place, step.endpoint)
        if fault := _misfit(place, rows):
            self._post(step.endpoint, SaveFailed(place.key, place.generation, fault))
            return
        try:
            pieces = self._region(place).views(place.extents, place.nbytes)
            self._device.save(rows, pieces)
        except Exception as error:
            failed(error)
            return
        saved = Saved([(place.key, place.generation)])
        self._device.later(partial(self._send, step.endpoint, saved), failed)

    def _save_failed(self, place: Placement, endpoint: str, error: BaseException) -> None:
        logger.error("Item %s could not be saved: %s: %s", place.key, type(error).__name__, error)
        trace = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {error}"
        self._post(endpoint, SaveFailed(place.key, place.generation, message[:4000], trace[-8000:]))

    def _post(self, endpoint: str, message: ToAgent) -> None:
        """Send behind all saves so far."""
        self._device.later(partial(self._send, endpoint, message), _log_unsent)

    def _send(self, endpoint: str, message: ToAgent) -> None:
        if self._client is None or self._client.endpoint != endpoint:
            if self._client is not None:
                self._client.close()
                self._client = None
            if not endpoint:
                return
            self._client = self._connect(endpoint, "worker")
        if not self._client.send(message):
            logger.warning(
                "The agent is gone, or takes no more messages: %s is lost", type(message).__name__
            )
        for answer in self._client.receive():
            if isinstance(answer, Refused):
                logger.error("The agent refused a message: %s", answer.message)


def _misfit(place: Placement, rows: torch.Tensor) -> str:
    """What is wrong with encoded rows, "" if they are what room was reserved for."""
    dtype = str(rows.dtype).removeprefix("torch.")
    nbytes = rows.numel() * rows.element_size()
    if tuple(rows.shape) == tuple(place.shape) and dtype == place.dtype and nbytes == place.nbytes:
        return ""
    return (
        f"the encoder gave {list(rows.shape)} of {dtype}, "
        f"but {list(place.shape)} of {place.dtype} was expected"
    )


def _log_unsent(error: BaseException) -> None:
    logger.error("A message to the agent was not sent: %s", error)
