# SPDX-License-Identifier: Apache-2.0
"""What two agents say to each other.

Envelope (kept from vLLM's in-tree ``cpu/protocol.py``): a DEALER sends
``[b"", body]`` or ``[b"", body, payload]``; a ROUTER sees the same behind an
identity frame. ``body`` is one msgpack map with a ``type`` tag.

Rules of evolution: a field may be added, always with a default; no field is
renamed, retyped or removed; an unknown field is ignored. Base fields are the
in-tree ones, so a peer that knows nothing else can ask and be answered.

=========  ==================  ===============================================
type       direction           meaning
=========  ==================  ===============================================
``req``    consumer→producer   grant me ``mm_hash`` (parked while it is saved)
``ack``    producer→consumer   granted, or why not
``chunk``  producer→consumer   a run of payload bytes (payload frame follows)
``credit`` consumer→producer   you may send that many bytes more
``done``   consumer→producer   I need the grant no longer; unpin
``ping``   anybody→producer    are you there, and what are you?
``pong``   producer→asker      what it is, speaks and has room for
=========  ==================  ===============================================
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from ec_connector.errors import WireError
from ec_connector.protocol.shown import PROOF_BYTES
from ec_connector.protocol.tickets import MAX_TICKET_CHARS

EC_CONNECTOR_VERSION: int = 1
"""Version of this wire. Bumped when old and new peers could misread each other."""

VERSION_WHEN_ABSENT: int = 1
"""What a request without a version means: the oldest wire, never "the same as mine"."""

MAX_BODY_BYTES = 64 * 1024
"""A body larger than this is refused before it is decoded."""
MAX_HASH_CHARS = 512
MAX_TEXT_CHARS = 4096
MAX_FACTORS = 32
MAX_CODEC_CHARS = 32
MAX_FACTOR_CHARS = 64
"""Name or value of a factor; a longer value travels as its digest, so requests stay small."""
MAX_TOKEN_CHARS = 64
MAX_RANK = 8
MAX_CREDIT_BYTES = 256 * 1024 * 1024
"""Payload under way on one grant; credit beyond it is not kept."""
MAX_EXTENTS = 16
"""An item in more pieces travels over ZMQ, so an ack stays below 1 KiB."""


class XferStatus(enum.IntEnum):
    """How a producer answers a request."""

    OK = 0
    NACK_MISSING = 1  # neither held nor being saved
    NACK_INCOMPAT = 2  # another model, dtype, weights ...: `factor` names which
    NACK_VERSION = 3  # another wire version
    NACK_INTERNAL = 4  # the save failed there: `message` and `traceback` say how
    NACK_NOT_READY = 5  # still being saved when the consumer's patience ended, or too busy


def _absent_version() -> int:
    # A factory, so that msgspec never treats the value as a default to omit.
    return VERSION_WHEN_ABSENT


class _OwnVersionByDefault(msgspec.StructMeta):
    """Calling the class fills in our version; decoding a frame does not.

    With a plain default both would, and a frame without a version would pass
    any version check.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 4:
            kwargs.setdefault("connector_version", EC_CONNECTOR_VERSION)
        return super().__call__(*args, **kwargs)


class XferReq(
    msgspec.Struct, metaclass=_OwnVersionByDefault, tag="req", omit_defaults=True, gc=False
):
    """Consumer to producer: grant me ``mm_hash``.

    ``session_id`` and ``mm_hash`` together name the grant. ``credit_bytes`` 0
    asks for the whole payload behind the ack; otherwise the payload comes in
    chunks while there is credit. ``timeout_ms`` is how long the request may be
    parked at the producer. ``ticket`` is the announcement's. ``fingerprint``
    holds further factors by name; one that a side does not know is not compared.
    ``codecs`` are ways for the payload to be made smaller over ZMQ, best first;
    none at all means ``["none"]``.
    """

    mm_hash: str
    compatibility_hash: str
    session_id: str = ""
    connector_version: int = msgspec.field(default_factory=_absent_version)
    xfer_id: int = 0
    fingerprint: dict[str, str] = {}
    planes: list[str] = []
    credit_bytes: int = 0
    chunk_bytes: int = 0
    timeout_ms: int = 0
    ticket: str = ""
    codecs: list[str] = []


class RegionRef(msgspec.Struct, omit_defaults=True, frozen=True, gc=False):
    """Where a process of the same host finds a pool region, for trying.

    The bytes are those of descriptor ``fd`` of process ``pid``. ``token`` (hex)
    stands at the start of the region and is compared after mapping, so a
    recycled pid, or a pid of another namespace, is noticed. Sizes in bytes.
    """

    pid: int
    fd: int
    nbytes: int
    block_bytes: int
    token: str


class XferAck(msgspec.Struct, tag="ack", omit_defaults=True, gc=False):
    """Producer to consumer: the answer to a request.

    On OK ``nbytes``, ``dtype`` and ``shape`` describe the item. On a NACK
    ``message`` says why, ``factor`` names the differing factor
    (NACK_INCOMPAT) and ``traceback`` is the producer's (NACK_INTERNAL).
    ``plane`` is how the bytes travel: ``"zmq"`` (this message's payload frame,
    or chunks) or ``"memory"`` (read ``extents`` of ``region``; check ``proof``
    before and ``generation`` after the copy). ``codec`` is the one of the
    request's that the chunks may use; with it no payload comes with the ack.
    """

    mm_hash: str
    status: XferStatus
    session_id: str = ""
    src_block_indices: list[int] = []
    agent_metadata: bytes = b""
    mem_descriptor: bytes = b""
    xfer_id: int = 0
    plane: str = ""
    nbytes: int = 0
    dtype: str = ""
    shape: list[int] = []
    message: str = ""
    factor: str = ""
    traceback: str = ""
    generation: int = 0
    extents: list[tuple[int, int]] = []
    region: RegionRef | None = None
    codec: str = ""
    proof: bytes = b""


class XferChunk(msgspec.Struct, tag="chunk", omit_defaults=True, gc=False):
    """Producer to consumer: payload bytes ``offset`` to ``offset + nbytes`` of a grant.

    With a ``codec`` the payload frame is ``packed_nbytes`` long, which is fewer, and
    unpacks to those bytes; ``checksum`` is the CRC-32 of the frame. Without one it
    is the bytes themselves, also under a grant with a codec: not every run shrinks.
    """

    session_id: str
    xfer_id: int
    offset: int = 0
    nbytes: int = 0
    codec: str = ""
    packed_nbytes: int = 0
    checksum: int = 0


class XferCredit(msgspec.Struct, tag="credit", omit_defaults=True, gc=False):
    """Consumer to producer: ``nbytes`` more may be sent for this grant."""

    session_id: str
    mm_hash: str
    xfer_id: int = 0
    nbytes: int = 0


class XferDone(msgspec.Struct, tag="done", omit_defaults=True, gc=False):
    """Consumer to producer: the grant is no longer needed (loaded or given up)."""

    session_id: str
    mm_hash: str
    xfer_id: int = 0


class XferPing(msgspec.Struct, tag="ping", omit_defaults=True, gc=False):
    """To a producer: answer with a pong of this ``seq``. ``ticket``: :meth:`Tickets.sign_ping`."""

    seq: int
    ticket: str = ""


class XferPong(
    msgspec.Struct, metaclass=_OwnVersionByDefault, tag="pong", omit_defaults=True, gc=False
):
    """From a producer: what a request would be compared with, and how full its pool is, in blocks.

    With ``withheld`` nothing is said: the ping had no ticket that counts here.
    """

    seq: int
    withheld: bool = False
    compatibility_hash: str = ""
    connector_version: int = msgspec.field(default_factory=_absent_version)
    fingerprint: dict[str, str] = {}
    planes: list[str] = []
    codecs: list[str] = []
    block_bytes: int = 0
    blocks: int = 0
    blocks_free: int = 0
    blocks_pinned: int = 0
    items: int = 0
    grants: int = 0
    parked: int = 0


ToProducer = XferReq | XferCredit | XferDone | XferPing
ToConsumer = XferAck | XferChunk | XferPong

_encoder = msgspec.msgpack.Encoder()
_to_producer: msgspec.msgpack.Decoder[ToProducer] = msgspec.msgpack.Decoder(ToProducer)
_to_consumer: msgspec.msgpack.Decoder[ToConsumer] = msgspec.msgpack.Decoder(ToConsumer)


def encode(message: ToProducer | ToConsumer) -> bytes:
    """One message as the body frame."""
    return _encoder.encode(message)


def decode_to_producer(body: bytes | memoryview) -> ToProducer:
    """A body frame from a consumer.

    Raises:
        WireError: too large, not msgpack, an unknown type, a wrong field type,
            or a field beyond its limit.
    """
    message: ToProducer = _checked(_decode(_to_producer, body))
    return message


def decode_to_consumer(body: bytes | memoryview) -> ToConsumer:
    """A body frame from a producer. Raises as :func:`decode_to_producer`."""
    message: ToConsumer = _checked(_decode(_to_consumer, body))
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes | memoryview) -> Any:
    if len(body) > MAX_BODY_BYTES:
        raise WireError(f"a body of {len(body)} bytes exceeds the limit of {MAX_BODY_BYTES}")
    try:
        return decoder.decode(body)
    # ValidationError is a DecodeError; msgspec before 0.23 lets a UnicodeDecodeError through.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"undecodable message of {len(body)} bytes: {error}") from error


def _checked(message: Any) -> Any:
    """Refuse values that are well-typed but outside what the wire allows."""
    texts, counts = _LIMITS_OF[type(message)]
    for name, limit in texts:
        text = getattr(message, name)
        if len(text) > limit:
            raise WireError(f"{name} of {len(text)} characters exceeds the limit of {limit}")
    for name in counts:
        if not 0 <= getattr(message, name) < 1 << 63:
            raise WireError(f"{name} {getattr(message, name)} is not a size")
    if isinstance(message, XferReq | XferPong):
        if len(message.fingerprint) > MAX_FACTORS or len(message.planes) > MAX_FACTORS:
            raise WireError(f"more than {MAX_FACTORS} factors or planes")
        if len(message.codecs) > MAX_FACTORS or any(
            len(name) > MAX_CODEC_CHARS for name in message.codecs
        ):
            raise WireError(
                f"more than {MAX_FACTORS} codecs, or a name of over {MAX_CODEC_CHARS} characters"
            )
        for text in (*message.planes, *message.fingerprint, *message.fingerprint.values()):
            if len(text) > MAX_FACTOR_CHARS:
                raise WireError(
                    f"a plane or factor of {len(text)} characters exceeds {MAX_FACTOR_CHARS}"
                )
    elif isinstance(message, XferAck):
        if len(message.shape) > MAX_RANK or any(size < 0 for size in message.shape):
            raise WireError(
                f"{message.shape[: MAX_RANK + 1]} is no shape of {MAX_RANK} axes or less"
            )
        if len(message.extents) > MAX_EXTENTS or any(min(run) < 0 for run in message.extents):
            raise WireError("extents are negative or too many")
        if len(message.proof) > PROOF_BYTES:
            raise WireError(f"a proof of {len(message.proof)} bytes exceeds {PROOF_BYTES}")
        if message.region is not None and not _is_place(message.region):
            raise WireError(f"{message.region!r:.200} is no place of a region")
    return message


def _is_place(region: RegionRef) -> bool:
    numbers = (region.pid, region.fd, region.nbytes, region.block_bytes)
    return min(numbers) >= 0 and max(numbers) < 1 << 63 and len(region.token) <= MAX_TOKEN_CHARS


_TEXT_LIMITS = {
    "mm_hash": MAX_HASH_CHARS,
    "session_id": MAX_HASH_CHARS,
    "compatibility_hash": MAX_HASH_CHARS,
    "ticket": MAX_TICKET_CHARS,
    "dtype": 32,
    "plane": 32,
    "codec": MAX_CODEC_CHARS,
    "factor": MAX_FACTOR_CHARS,
    "message": MAX_TEXT_CHARS,
    "traceback": 4 * MAX_TEXT_CHARS,
}
_COUNTS = {
    "xfer_id", "nbytes", "offset", "credit_bytes", "chunk_bytes", "timeout_ms", "generation",
    "packed_nbytes", "checksum", "seq", "block_bytes", "blocks", "blocks_free", "blocks_pinned",
    "items", "grants", "parked",
}  # fmt: skip
_LIMITS_OF = {
    kind: (
        [(name, _TEXT_LIMITS[name]) for name in kind.__struct_fields__ if name in _TEXT_LIMITS],
        [name for name in kind.__struct_fields__ if name in _COUNTS],
    )
    for kind in (XferReq, XferCredit, XferDone, XferAck, XferChunk, XferPing, XferPong)
}
