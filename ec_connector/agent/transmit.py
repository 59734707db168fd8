# SPDX-License-Identifier: Apache-2.0
"""Sending pool bytes without copying them, and knowing when they have left.

ZMQ reads a frame's memory until it is written to the network. A grant's pin may
end only then, however early the consumer or the clock ends the grant.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from ec_connector.errors import InternalError
from ec_connector.pool.blocks import BlockPool
from ec_connector.pool.region import Region
from ec_connector.protocol.account import Account
from ec_connector.protocol.effects import EndGrant, SendToConsumer, Span
from ec_connector.protocol.messages import XferChunk, encode

if TYPE_CHECKING:
    from ec_connector.codecs.work import Packed


_LOOKED_AT = 64
_SAMPLE = 16
"""One transfer of so many is watched until it has left."""
_SAMPLES_WAITING = 64
"""A thousand small transfers, 64 MiB of copies at most: who has not read them asks too much."""


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
    """Sends answers on the ROUTER, payload straight from the pool.

    Args:
        router: the socket.
        region: the pool's memory.
        pool: whose pins end here.
        book: takes the account of a grant that is over.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        region: Region,
        pool: BlockPool,
        book: Callable[[Account, float], None],
    ) -> None:
        self._router = router
        self._region = region
        self._pool = pool
        self._book = book
        self._under_way: dict[str, list[zmq.MessageTracker]] = {}
        self._ending: dict[str, EndGrant] = {}
        self._reading: dict[str, list[Future[Any]]] = {}
        self._samples: dict[bytes, deque[zmq.MessageTracker]] = {}
        self._packed: list[tuple[bytes, zmq.MessageTracker, int]] = []
        self.bytes_sent = 0
        self.bytes_saved = 0
        # The first of its kind in a process starts a thread of pyzmq's, which takes a millisecond:
        # rather now than in somebody's first fetch.
        zmq.Frame(bytes(zmq.COPY_THRESHOLD), track=True, copy=False)

    def send(self, effect: SendToConsumer) -> bool:
        """Queue one message. False when the peer cannot be reached any more."""
        body = encode(effect.message)
        frames: list[bytes | memoryview | zmq.Frame] = [effect.peer, b"", body]
        payload = effect.payload
        if payload is not None:
            views = span_views(self._region, payload)
            # ZMQ frames are contiguous; an entry in pieces is joined, rarely and in small runs.
            data = views[0] if len(views) == 1 else b"".join(views)
            frames.append(self._sampled(effect, data))
        try:
            tracker = self._router.send_multipart(
                frames, zmq.NOBLOCK, copy=payload is None, track=payload is not None
            )
        except zmq.ZMQError:
            return False
        if effect.account is not None:
            effect.account.header_out += len(body)
            effect.account.payload_out += payload.nbytes if payload is not None else 0
        if payload is not None:
            self.bytes_sent += payload.nbytes
            if tracker is not None and not tracker.done:
                under_way = self._under_way.setdefault(effect.grant, [])
                under_way[:] = [t for t in under_way if not t.done]
                under_way.append(tracker)
        return True

    def send_packed(self, effect: SendToConsumer, packed: Packed) -> bool:
        """Queue a chunk in its packed form. False when the peer cannot be reached any more."""
        chunk = effect.message
        if not isinstance(chunk, XferChunk):
            raise InternalError(f"a {type(chunk).__name__} of {effect.grant} is not to be packed")
        nbytes = len(packed.data)
        message = msgspec.structs.replace(
            chunk, codec=effect.codec, packed_nbytes=nbytes, checksum=packed.checksum
        )
        body = encode(message)
        frames = [effect.peer, b"", body, packed.data]
        try:
            tracker = self._router.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError:
            return False
        if effect.account is not None:
            effect.account.header_out += len(body)
            effect.account.payload_out += nbytes
        self.bytes_sent += nbytes
        self.bytes_saved += chunk.nbytes - nbytes
        if tracker is not None and not tracker.done:
            self._packed.append((effect.peer, tracker, nbytes))
        return True

    def _sampled(
        self, effect: SendToConsumer, data: bytes | memoryview
    ) -> bytes | memoryview | zmq.Frame:
        """Payload as it is to be sent; of some transfers so that it is seen whether it has left.

        pyzmq copies a small frame, and then nobody can tell whether it still waits.
        """
        if len(data) >= zmq.COPY_THRESHOLD or hash(effect.grant) % _SAMPLE:
            return data
        frame = zmq.Frame(data, track=True, copy=False, copy_threshold=0)
        if isinstance(frame.tracker, zmq.MessageTracker):
            self._samples.setdefault(effect.peer, deque()).append(frame.tracker)
        for peer in list(islice(self._samples, 2)):  # so that those of peers that are gone go too
            samples = self._samples.pop(peer)
            while samples and samples[0].done:
                samples.popleft()
            if samples:
                self._samples[peer] = samples
        return frame

    def behind(self, peer: bytes) -> bool:
        """Whether so much waits for this peer, in copies, that it should get no more for now."""
        samples = self._samples.get(peer)
        while samples and samples[0].done:
            samples.popleft()
        return samples is not None and len(samples) >= _SAMPLES_WAITING

    def packed_leaving(self) -> Counter[bytes]:
        """Packed bytes that were sent and are still in this process, by peer."""
        self._packed = [one for one in self._packed if not one[1].done]
        leaving: Counter[bytes] = Counter()
        for peer, _, nbytes in self._packed:
            leaving[peer] += nbytes
        return leaving

    def end(self, effect: EndGrant, reading: list[Future[Any]], now: float) -> None:
        """Unpin when the grant's frames have left, and ``reading`` is done with its bytes."""
        self._ending[effect.grant] = effect
        if reading:
            self._reading[effect.grant] = reading
        self.sweep(now)

    def sweep(self, now: float) -> None:
        """Unpin grants that ended and whose frames have left by now.

        So many are looked at in one call, the others in later ones: a peer that asks and does not
        read must not slow down the loop with all that waits for it.
        """
        for grant in list(islice(self._ending, _LOOKED_AT)):
            ending = self._ending.pop(grant)
            sent = all(tracker.done for tracker in self._under_way.get(grant, ()))
            if sent and all(future.done() for future in self._reading.get(grant, ())):
                self._under_way.pop(grant, None)
                self._reading.pop(grant, None)
                self._pool.unpin(ending.entry.generation, grant, now)
                self._book(ending.account, now)
            else:
                self._ending[grant] = ending  # behind the others

    def busy(self) -> bool:
        """Whether :meth:`sweep` must be called again although nothing else happens."""
        return bool(self._ending)
