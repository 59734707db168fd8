# SPDX-License-Identifier: Apache-2.0
"""Taking messages off sockets without trusting their shape.

Payload goes straight into pool blocks. ``recv_into`` cuts a longer frame short
without a word, so its return value (the frame's full length) is compared with
the room it had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import zmq

from ec_connector.agent.transmit import span_views
from ec_connector.errors import WireError
from ec_connector.pool.region import Region
from ec_connector.protocol.effects import Span
from ec_connector.protocol.messages import (
    MAX_BODY_BYTES,
    ToConsumer,
    ToProducer,
    XferAck,
    XferChunk,
    XferPong,
    XferReq,
    decode_to_consumer,
    decode_to_producer,
)

_POLLIN = int(zmq.POLLIN)  # arithmetic on zmq's own flag type is slow


class Request(NamedTuple):
    """A consumer's message. ``header``: its bytes. ``host``: that of who asks for an item."""

    peer: bytes
    message: ToProducer
    header: int
    host: str = ""


class Answer(NamedTuple):
    """A producer's message. ``header``: its bytes, without payload.

    ``payload`` is its length as it came, 0 when it had no place and was thrown away, None when
    there was none; or the payload itself.
    """

    message: ToConsumer
    payload: int | memoryview | None
    header: int


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be taken now."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def discard_rest(socket: zmq.Socket[bytes]) -> int:
    """Throw away the remaining frames of a message; how many they were."""
    frames = 0
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv(copy=False)
        frames += 1
    return frames


def take_request(
    router: zmq.Socket[bytes], welcome: Callable[[zmq.Frame], bool] | None = None
) -> Request:
    """One message from a consumer.

    ``welcome`` is asked whether the frame's sender may still ask. Call it only when
    :func:`has_message`.

    Raises:
        WireError: it is not one; the rest of it has been thrown away.
    """
    first = router.recv(copy=False)
    known = welcome is None or welcome(first)
    frames = [router.recv() for _ in range(2) if router.getsockopt(zmq.RCVMORE)]
    extra = discard_rest(router)
    if not known:
        raise WireError("its client key was taken off the list")
    if len(frames) != 2 or frames[0] or extra:
        raise WireError(f"a request of {1 + len(frames) + extra} frames; 3 were due")
    message = decode_to_producer(frames[1])
    host = ""
    if isinstance(message, XferReq):
        # A socket of both families shows addresses of the old one as new ones.
        host = str(first.get("Peer-Address")).removeprefix("::ffff:")
    return Request(first.bytes, message, len(frames[1]), host)


def take_answer(
    dealer: zmq.Socket[bytes],
    region: Region,
    landing: Callable[[XferAck | XferChunk], Span | int | None],
) -> Answer:
    """One message from a producer, its payload (if any) written where ``landing`` says.

    Where ``landing`` gives a length, the payload itself is handed on, if it is so long. Call it
    only when :func:`has_message`.

    Raises:
        WireError: it is not one; the rest of it has been thrown away.
    """
    first = dealer.recv(copy=False)
    more = dealer.getsockopt(zmq.RCVMORE)
    body = dealer.recv(copy=False).buffer if more and not len(first) else None
    if body is None or len(body) > MAX_BODY_BYTES:
        discard_rest(dealer)
        raise WireError("an answer without a body, or with one beyond the limit")
    try:
        message = decode_to_consumer(body)
    except WireError:
        discard_rest(dealer)
        raise
    if not dealer.getsockopt(zmq.RCVMORE):
        return Answer(message, None, len(body))
    place = landing(message) if not isinstance(message, XferPong) else None
    received: int | memoryview = 0
    if isinstance(place, Span):
        received = _receive_payload(dealer, region, place)
    elif place is not None:
        payload = dealer.recv(copy=False).buffer
        received = payload if len(payload) == place else 0
    return Answer(message, 0 if discard_rest(dealer) else received, len(body))


def _receive_payload(dealer: zmq.Socket[bytes], region: Region, span: Span) -> int:
    views = span_views(region, span)
    if len(views) == 1:
        length = dealer.recv_into(views[0])
    else:
        frame = dealer.recv(copy=False).buffer
        length = len(frame)
        offset = 0
        for view in views if length == span.nbytes else ():
            view[:] = frame[offset : offset + len(view)]
            offset += len(view)
    return length
