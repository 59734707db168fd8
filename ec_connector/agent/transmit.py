# SPDX-License-Identifier: Apache-2.0
"""Sending pool bytes without copying them, and knowing when they have left.

ZMQ reads a frame's memory until it is written to the network. A grant's pin may
end only then, however early the consumer or the clock ends the grant.
"""

from __future__ import annotations

import zmq

from ec_connector.pool.blocks import BlockPool, Entry
from ec_connector.pool.region import Region
from ec_connector.protocol.effects import EndGrant, SendToConsumer, Span
from ec_connector.protocol.messages import encode


def span_views(region: Region, span: Span) -> list[memoryview]:
    """The memory of a span: mostly one view, several where the entry is in pieces."""
    views = []
    skip, left = span.offset, span.nbytes
    for view in region.views(span.entry.extents, span.entry.nbytes):
        part = view[skip : skip + left]
        skip = max(0, skip - len(view))
        if len(part):
            views.append(part)
            left -= len(part)
    return views


class Transmitter:
    """Sends answers on the ROUTER, payload straight from the pool."""

    def __init__(self, router: zmq.Socket[bytes], region: Region, pool: BlockPool) -> None:
        self._router = router
        self._region = region
        self._pool = pool
        self._under_way: dict[str, list[zmq.MessageTracker]] = {}
        self._ending: dict[str, Entry] = {}
        self.bytes_sent = 0
        # The first of its kind in a process starts a thread of pyzmq's, which takes a millisecond:
        # rather now than in somebody's first fetch.
        zmq.Frame(bytes(zmq.COPY_THRESHOLD), track=True, copy=False)

    def send(self, effect: SendToConsumer) -> bool:
        """Queue one message. False when the peer cannot be reached any more."""
        frames: list[bytes | memoryview] = [effect.peer, b"", encode(effect.message)]
        payload = effect.payload
        if payload is not None:
            views = span_views(self._region, payload)
            # ZMQ frames are contiguous; an entry in pieces is joined, rarely and in small runs.
            frames.append(views[0] if len(views) == 1 else b"".join(views))
        try:
            tracker = self._router.send_multipart(
                frames, zmq.NOBLOCK, copy=payload is None, track=payload is not None
            )
        except zmq.ZMQError:
            return False
        if payload is not None:
            self.bytes_sent += payload.nbytes
            if tracker is not None and not tracker.done:
                under_way = self._under_way.setdefault(effect.grant, [])
                under_way[:] = [t for t in under_way if not t.done]
                under_way.append(tracker)
        return True

    def end(self, effect: EndGrant, now: float) -> None:
        """Unpin when the grant's frames have left."""
        self._ending[effect.grant] = effect.entry
        self.sweep(now)

    def sweep(self, now: float) -> None:
        """Unpin grants that ended and whose frames have left by now."""
        for grant in list(self._ending):
            if all(tracker.done for tracker in self._under_way.get(grant, ())):
                self._under_way.pop(grant, None)
                self._pool.unpin(self._ending.pop(grant).generation, grant, now)

    def busy(self) -> bool:
        """Whether :meth:`sweep` must be called again although nothing else happens."""
        return bool(self._ending)
