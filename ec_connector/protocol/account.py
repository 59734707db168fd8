# SPDX-License-Identifier: Apache-2.0
"""What one transfer costs at one of its two ends: bytes each way, and where its time goes.

A transfer is in one stage at a time, so the stages add up to its whole time; packing and
unpacking run beside them, in threads, and are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

CONSUMER: Final = "consumer"
PRODUCER: Final = "producer"

LOOPBACK: Final = "loopback"
"""What the link within a host is called."""

WAITING: Final = "waiting"
"""Consumer: until the producer granted it (room in the pool, connecting, the producer's save, the
way there and back). Producer: until the item was saved."""
SENDING: Final = "sending"
"""Producer: from the grant until its last frame has left and the consumer needs it no longer."""
RECEIVING: Final = "receiving"
"""Consumer: from the grant until all bytes are in the pool, however they come."""
LOADING: Final = "loading"
"""Consumer: from then on until the first that asked for it has copied it out of the pool."""
PACKING: Final = "packing"
"""Seconds of threads that packed or unpacked; beside the other stages."""
STAGES: Final = (WAITING, SENDING, RECEIVING, LOADING, PACKING)
PARTS: Final = ("header_out", "header_in", "payload_out", "payload_in")

DELIVERED: Final = "delivered"


@dataclass(slots=True)
class Account:
    """One transfer of an item, whatever became of it. Bytes, and seconds of the caller's clock.

    Attributes:
        host: of the peer, as it was announced or is seen.
        peer: ``host:port`` of a producer; a consumer has no port of its own.
        outcome: how it ended: ``"delivered"`` or a reason at the consumer, an event of the table
            ``GRANT`` at the producer.
        header_out: message bodies without payload; ``payload_out`` is as it left, so packed.
        payload_in: over the plane ``memory`` what was copied out of the peer's memory, of which
            the peer knows nothing.
    """

    item: str
    host: str
    peer: str
    role: str
    began: float
    plane: str = ""
    codec: str = ""
    nbytes: int = 0
    outcome: str = ""
    header_out: int = 0
    header_in: int = 0
    payload_out: int = 0
    payload_in: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    _stage: str = WAITING
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._since = self.began

    @property
    def total(self) -> float:
        """Seconds from beginning to end."""
        return self._since - self.began

    def turn(self, stage: str, now: float) -> None:
        """The next stage begins."""
        self.add(self._stage, now - self._since)
        self._stage, self._since = stage, now

    def add(self, stage: str, seconds: float) -> None:
        """Time spent on a stage; a clock that is set back takes nothing away."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + max(0.0, seconds)

    def end(self, now: float) -> None:
        """The last stage is over."""
        self.turn("", now)
