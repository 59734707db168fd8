# SPDX-License-Identifier: Apache-2.0
"""What an engine process (or :class:`ec_connector.Producer`) and its agent say to each other.

Over an ``ipc`` DEALER/ROUTER pair of one host and one user, msgpack maps with a
``type`` tag. Every message here is cheap and none waits for another process:
the agent answers from its own loop, never from an engine step.

One save, one load::

    scheduler                 agent                    worker
      │ Reserve(step, items)    │                        │
      ├────────────────────────►│                        │
      │◄────────────────────────┤ Reserved(extents)      │
      │ ── extents travel in the step's metadata ───────►│ copies rows into the extents
      │                         │◄───────────────────────┤ Saved / SaveFailed / StepDone(step)
      │ Fetch(items)            │
      ├────────────────────────►│ … asks the peer, receives into the pool …
      │◄────────────────────────┤ Ready(extents), pinned for this client
      │ ── extents travel in the step's metadata ───────►│ copies rows out of the extents
      │ Loaded(keys)            │
      ├────────────────────────►│ … the request goes on; later:
      │ Release(keys)           │
      ├────────────────────────►│
"""

from __future__ import annotations

from typing import Any

import msgspec

from ec_connector.errors import WireError
from ec_connector.protocol.messages import RegionRef

LOCAL_VERSION: int = 1
MAX_LOCAL_BYTES = 16 * 1024 * 1024


class _Local(msgspec.Struct, omit_defaults=True, gc=False):
    pass


# ── client to agent ──────────────────────────────────────────────────────────


class Hello(_Local, tag="hello"):
    """First message of a client. ``pid``: whose death ends its pins and reservations.

    ``compatibility_hash`` and ``factors`` say what the client's engine is. An
    agent serves engines of one kind: it takes over what it did not know, and
    refuses a client that contradicts it.
    """

    pid: int
    role: str = "client"  # "scheduler", "worker" or "client"
    version: int = LOCAL_VERSION
    compatibility_hash: str = ""
    factors: dict[str, str] = {}


class ReserveItem(_Local):
    """Room for one item: raw row bytes, torch's dtype name without ``torch.``, shape."""

    key: str
    nbytes: int
    dtype: str
    shape: list[int]


class Reserve(_Local, tag="reserve"):
    """Room for the items that engine step ``step`` will save; answered by :class:`Reserved`.

    With ``replace`` an item that is here already makes way for the new bytes.
    """

    seq: int
    step: int
    items: list[ReserveItem]
    replace: bool = False


class Saved(_Local, tag="saved"):
    """The rows of these reservations (by generation) are in the pool: serve them."""

    items: list[tuple[str, int]]


class SaveFailed(_Local, tag="save_failed"):
    """The save of one reservation failed; whoever is parked on it is told why."""

    key: str
    generation: int
    message: str
    traceback: str = ""


class StepDone(_Local, tag="step_done"):
    """Nothing reserved for a step up to ``step`` will be written any more.

    The agent frees reservations of those steps that were never saved. Until it
    has this word (or the writer is dead) their blocks are not reused, so a slow
    writer can never overwrite another item.
    """

    step: int


class FetchItem(_Local):
    """An item wanted in the pool, pinned for the asking client.

    Without ``peer_host`` only this agent's own pool is asked. ``nbytes``,
    ``dtype`` and ``shape`` are what must arrive; ``timeout_ms`` counts from
    receipt of this message.
    """

    key: str
    timeout_ms: int
    peer_host: str = ""
    peer_port: int = 0
    nbytes: int = 0
    dtype: str = ""
    shape: list[int] = []
    ticket: str = ""


class Fetch(_Local, tag="fetch"):
    """Each item is answered by exactly one :class:`Ready` or :class:`Failed`."""

    items: list[FetchItem]


class Release(_Local, tag="release"):
    """The client no longer needs these items: unpin, or stop fetching for it."""

    keys: list[str]


class Loaded(_Local, tag="loaded"):
    """The client has copied these items out of the pool; it may hold them all the same.

    For the books only: with it the transfer that brought an item is over.
    """

    keys: list[str]


class DropAll(_Local, tag="drop_all"):
    """The model's weights changed: serve nothing saved or fetched before this message.

    ``factors``: all that the client's engine is from now on; empty where that is what it was. Other
    clients that say otherwise are turned away.
    """

    factors: dict[str, str] = {}


class AskStats(_Local, tag="ask_stats"):
    """Answered by :class:`Stats`.

    ``reasons``: what the client counted by reason since it knows this agent, for who asks for the
    agent's :class:`State`.
    """

    seq: int = 0
    reasons: dict[str, dict[str, int]] = {}


class AskState(_Local, tag="ask_state"):
    """Answered by :class:`State`, with the transfers numbered above ``after``."""

    after: int = 0


# ── agent to client ──────────────────────────────────────────────────────────


class Welcome(_Local, tag="welcome"):
    """Answer to :class:`Hello`. ``peer_*`` is the address to announce (port 0: none)."""

    agent_id: str
    agent_pid: int
    region: RegionRef
    peer_host: str = ""
    peer_port: int = 0
    version: int = LOCAL_VERSION


class ReservedItem(_Local):
    """Where to write one item: ``extents`` in blocks, in order.

    ``held``: the pool has the item or is getting it, do not save it again. ``refused``:
    why there is no room (nothing to write; do not announce the item).
    """

    key: str
    generation: int = 0
    extents: list[tuple[int, int]] = []
    held: bool = False
    refused: str = ""


class Reserved(_Local, tag="reserved"):
    """Answer to :class:`Reserve`, items in the same order."""

    seq: int
    items: list[ReservedItem]


class Ready(_Local, tag="ready"):
    """The item is in the pool and pinned for this client until it sends :class:`Release`.

    ``plane`` is how it came: ``"pool"`` (it was here), ``"zmq"``, ``"memory"``.
    ``elapsed_us``: from receipt of the fetch to usable bytes.
    """

    key: str
    generation: int
    extents: list[tuple[int, int]]
    nbytes: int
    dtype: str
    shape: list[int]
    plane: str = "pool"
    peer: str = ""
    elapsed_us: int = 0


class Failed(_Local, tag="failed"):
    """The item cannot be had. ``reason``: a label of :mod:`ec_connector.errors`."""

    key: str
    reason: str
    message: str
    factor: str = ""
    peer: str = ""


class Stats(_Local, tag="stats"):
    """Counters and gauges of the agent, by name; ``links`` as in :class:`State`."""

    values: dict[str, Any]
    seq: int = 0
    links: dict[str, dict[str, float]] = {}


class Transfer(_Local):
    """One transfer at this agent's end: the record that :mod:`ec_connector.protocol.account` makes.

    Sizes in bytes, times in seconds, ``seconds`` by stage. ``number`` counts the agent's records.
    """

    number: int
    item: str
    peer: str
    role: str
    link: str
    plane: str
    codec: str
    outcome: str
    nbytes: int
    header_out: int
    header_in: int
    payload_out: int
    payload_in: int
    seconds: dict[str, float]
    total: float


class PeerSums(_Local):
    """All transfers with one peer in one role: bytes with headers, seconds from begin to end."""

    peer: str
    role: str
    link: str
    plane: str = ""
    transfers: int = 0
    failed: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0


class State(_Local, tag="state"):
    """What an agent is, has and did.

    ``links`` as :data:`ec_connector.protocol.ledger.Links`; ``reasons`` are those of its clients'
    :class:`AskStats`; ``transfers`` the latest ones.
    """

    agent_pid: int
    address: str
    compatibility_hash: str
    factors: dict[str, str]
    planes: list[str]
    codecs: list[str]
    values: dict[str, Any]
    links: dict[str, dict[str, float]]
    reasons: dict[str, dict[str, int]]
    peers: list[PeerSums]
    transfers: list[Transfer]


class Refused(_Local, tag="refused"):
    """The agent could not understand or allow a message of this client."""

    message: str


ToAgent = (
    Hello
    | Reserve
    | Saved
    | SaveFailed
    | StepDone
    | Fetch
    | Release
    | Loaded
    | DropAll
    | AskStats
    | AskState
)
ToClient = Welcome | Reserved | Ready | Failed | Stats | State | Refused

_encoder = msgspec.msgpack.Encoder()
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)

# Before msgspec 0.23 text and map keys of a free form fail with errors of Python's own.
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError)


def encode_local(message: ToAgent | ToClient) -> bytes:
    """One message as one frame. Raises WireError when it holds what msgpack cannot."""
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise WireError(f"unencodable local message: {error}") from error


def decode_to_agent(frame: bytes | memoryview) -> ToAgent:
    """A client's frame. Raises WireError when it is not one."""
    if len(frame) > MAX_LOCAL_BYTES:
        raise WireError(f"a local message of {len(frame)} bytes exceeds {MAX_LOCAL_BYTES}")
    try:
        return _to_agent.decode(frame)
    except _UNDECODABLE as error:
        raise WireError(f"undecodable local message: {error}") from error


def decode_to_client(frame: bytes | memoryview) -> ToClient:
    """An agent's frame. Raises WireError when it is not one."""
    try:
        return _to_client.decode(frame)
    except _UNDECODABLE as error:
        raise WireError(f"undecodable local message: {error}") from error
