# SPDX-License-Identifier: Apache-2.0
"""The same-host plane: read a peer's pool through mapped memory.

A producer's answer says where its region might be; whether this process may map
it is found out by trying, and whether the producer may show it by a proof that only
who maps it can make. A producer pins what is being read, but a pin is only
a lease: the entry's generation is checked after the copy, so bytes that were
overwritten underneath are thrown away and the item is fetched over ZMQ.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections import deque
from dataclasses import dataclass

from ec_connector.errors import RegionError
from ec_connector.pool.region import Region
from ec_connector.protocol.effects import Address, CopyFromPeer
from ec_connector.protocol.shown import proof_of

logger = logging.getLogger("vllm.ec_connector.agent")

SLICE_BYTES = 8 * 1024 * 1024
"""Copied in one go, so that a large item does not hold up the loop."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy ended; ``fault`` is empty when the bytes are good."""

    xfer_id: int
    fault: str


@dataclass(slots=True)
class _Job:
    effect: CopyFromPeer
    source: list[memoryview]
    target: list[memoryview]


class SameHostPlane:
    """Maps peers' regions and copies out of them, a slice at a time.

    A mapping is closed with its peer's connection: it would keep the memory of a
    dead agent alive.
    """

    def __init__(self, own: Region) -> None:
        self._own = own
        self._regions: dict[Address, Region] = {}
        self._jobs: deque[_Job] = deque()
        self._failed: list[Copied] = []
        self._fence = threading.Lock()
        self._said: set[Address] = set()

    def start(self, effect: CopyFromPeer) -> None:
        """Begin a copy; :meth:`work` carries it out and tells of its end."""
        target = effect.target
        try:
            region = self._region(effect)
            if not effect.extents:
                raise RegionError("it names no extents")
            if sum(count for _, count in effect.extents) * region.block_bytes < target.nbytes:
                raise RegionError("its extents are smaller than the item")
            source = region.views(effect.extents, target.nbytes)
            shown = (effect.generation, target.nbytes, effect.extents)
            if not hmac.compare_digest(effect.proof, proof_of(region.secret, *shown)):
                raise RegionError("it does not prove that its owner shows this memory")
        except RegionError as error:
            if effect.address not in self._said:
                self._said.add(effect.address)
                logger.warning("peer=%s not through shared memory: %s", effect.address, error)
            self._failed.append(Copied(effect.xfer_id, str(error)))
            return
        self._jobs.append(_Job(effect, source, self._own.views(target.extents, target.nbytes)))

    def stop(self, xfer_id: int) -> None:
        """Drop a copy without a word: its target belongs to somebody else now."""
        for job in [j for j in self._jobs if j.effect.xfer_id == xfer_id]:
            self._jobs.remove(job)

    def busy(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return bool(self._jobs or self._failed)

    def work(self) -> list[Copied]:
        """Copy one slice of the oldest copy; copies that ended by now."""
        ended, self._failed = self._failed, []
        if self._jobs:
            job = self._jobs.popleft()
            if self._copy_slice(job):
                ended.append(Copied(job.effect.xfer_id, self._check(job.effect)))
            else:
                self._jobs.append(job)
        return ended

    def forget(self, address: Address) -> None:
        """The peer is gone: unmap its memory."""
        self._said.discard(address)
        self._unmap(address)

    def _unmap(self, address: Address) -> None:
        for job in [j for j in self._jobs if j.effect.address == address]:
            self._jobs.remove(job)
            self._failed.append(Copied(job.effect.xfer_id, "the peer is gone"))
        region = self._regions.pop(address, None)
        if region is not None:
            region.close()

    def close(self) -> None:
        """Unmap everything."""
        self._jobs.clear()
        for address in list(self._regions):
            self.forget(address)

    def _region(self, effect: CopyFromPeer) -> Region:
        held = self._regions.get(effect.address)
        if held is not None and held.ref == effect.region:
            return held
        self._unmap(effect.address)
        region = Region.open(effect.region, writable=False)
        self._regions[effect.address] = region
        return region

    def _copy_slice(self, job: _Job) -> bool:
        left = SLICE_BYTES
        while left and job.source:
            source, target = job.source[0], job.target[0]
            nbytes = min(left, len(source), len(target))
            target[:nbytes] = source[:nbytes]
            left -= nbytes
            for views in (job.source, job.target):
                views[0] = views[0][nbytes:]
                if not len(views[0]):
                    del views[0]
        return not job.source

    def _check(self, effect: CopyFromPeer) -> str:
        # Twice through a lock: the copy's loads are done before the generation is loaded,
        # also on processors that reorder loads.
        for _ in range(2):
            with self._fence:
                pass
        seen = self._regions[effect.address].generation(effect.extents[0][0])
        if seen == effect.generation:
            return ""
        return f"overwritten while it was read (generation {seen}, {effect.generation} was granted)"
