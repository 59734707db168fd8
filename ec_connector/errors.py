# SPDX-License-Identifier: Apache-2.0
"""Every exception of this package, one class per way of failing.

::

    ECConnectorError
    ├── ConfigError            a setting is unknown, mistyped or contradicts another
    ├── RegionError            the pool's memory cannot be made, opened or mapped
    ├── PoolError
    │   ├── ItemTooLargeError  larger than the whole pool: will never fit
    │   └── PoolFullError      everything else in the pool is pinned or being saved
    ├── AgentError
    │   ├── AgentStartError    the agent process did not come up
    │   └── AgentLostError     the agent died or does not answer
    ├── WireError              a peer's bytes are not a message of ours
    ├── CodecError             packed bytes that cannot be made, or made into rows again
    ├── InternalError          a call that the current state does not allow: a bug here
    └── FetchError             an item could not be had; `reason` is the counted label
        ├── ItemMissingError       the producer does not hold it
        ├── IncompatibleError      the peers differ; `factor` names in what
        ├── VersionMismatchError   the peers speak different wire versions
        ├── RemoteSaveError        the save failed at the producer (its traceback is in the text)
        ├── PeerRefusedError       the address is not one we may dial
        ├── PeerUnreachableError   no connection, or it broke
        ├── DeadlineError          not there in time
        ├── MismatchError          what arrived is not what was announced or expected
        ├── NoRoomError            no room in this pool before the deadline
        └── AgentDownError         this engine's own agent is down
"""

from __future__ import annotations

from typing import ClassVar


class ECConnectorError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(ECConnectorError):
    """A setting is unknown, mistyped or contradicts another; the text says what to do."""


class RegionError(ECConnectorError):
    """The pool's memory cannot be made, opened or mapped."""


class PoolError(ECConnectorError):
    """The pool cannot take an item now or ever."""


class ItemTooLargeError(PoolError):
    """Larger than the whole pool: will never fit."""


class PoolFullError(PoolError):
    """Everything in the pool is pinned or being saved."""


class AgentError(ECConnectorError):
    """Something is wrong with the agent process."""


class AgentStartError(AgentError):
    """The agent process did not come up; the text holds its own words."""


class AgentLostError(AgentError):
    """The agent died or does not answer."""


class WireError(ECConnectorError):
    """A peer's bytes are not a message of ours. Never ends the receiver."""


class CodecError(ECConnectorError):
    """Packed bytes are damaged or of another size, or their library is not here."""


class InternalError(ECConnectorError):
    """A call that the current state does not allow: a bug in this package."""


class FetchError(ECConnectorError):
    """An item could not be had. ``reason`` is the bounded label that metrics count."""

    reason: ClassVar[str] = "failed"


class ItemMissingError(FetchError):
    """The producer neither holds the item nor is saving it."""

    reason = "missing"


class IncompatibleError(FetchError):
    """Producer and consumer differ in something that changes the bytes."""

    reason = "incompatible"

    def __init__(self, message: str, factor: str = "") -> None:
        super().__init__(message)
        self.factor = factor


class VersionMismatchError(FetchError):
    """The peers speak different wire versions."""

    reason = "version"


class RemoteSaveError(FetchError):
    """The save failed at the producer; its message and traceback are in the text."""

    reason = "remote_error"


class PeerRefusedError(FetchError):
    """The announced address is not one this consumer may dial."""

    reason = "peer_refused"


class PeerUnreachableError(FetchError):
    """No connection to the producer, or it broke and did not come back."""

    reason = "peer_unreachable"


class DeadlineError(FetchError):
    """Not there in time."""

    reason = "deadline"


class MismatchError(FetchError):
    """What arrived is not what was announced or expected (size, rows, width, dtype)."""

    reason = "mismatch"


class NoRoomError(FetchError):
    """This consumer's pool has no room for the item before its deadline."""

    reason = "pool_full"


class AgentDownError(FetchError):
    """This engine's own agent is down, so nothing can be fetched."""

    reason = "agent_down"


def fetch_error(reason: str, message: str, factor: str = "") -> FetchError:
    """The exception for a counted reason, as an agent reports it."""
    if reason == IncompatibleError.reason:
        return IncompatibleError(message, factor)
    for kind in FetchError.__subclasses__():
        if kind.reason == reason:
            return kind(message)
    return FetchError(message)
