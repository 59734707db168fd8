# SPDX-License-Identifier: Apache-2.0
"""Producer side of the scheduler: which items to save in a step, and which may be announced.

Pure. An item is announced when the agent's last word on it was "reserved" or
"held". The agent may have evicted it since; a consumer is then told so and
falls back. The agent is asked anew for every request that brings the item, so
what the engine still has in its encoder cache is published again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ec_connector.dtypes import lookup
from ec_connector.engine.keys import why_not_shared
from ec_connector.engine.step import Placement
from ec_connector.protocol.local import ReservedItem, ReserveItem

_REMEMBERED: Final = 65536


@dataclass(frozen=True, slots=True)
class Offer:
    """An item that a peer may fetch here: bytes and ``(rows, width)``."""

    nbytes: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class StepSaves:
    """What came of one step's reservations; ``refused`` maps a key to a reason and words."""

    saves: dict[str, Placement] = field(default_factory=dict)
    republish: dict[str, Placement] = field(default_factory=dict)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)


class Offers:
    """The items that one producing engine has, had or is about to have.

    Args:
        dtype: element type of the encoder outputs, without ``torch.``.
        widths: columns of an encoder output, by modality.
    """

    def __init__(self, dtype: str, widths: Mapping[str, int]) -> None:
        self._dtype = dtype
        self._itemsize = lookup(dtype).itemsize
        self._widths = widths
        self._offered: OrderedDict[str, Offer] = OrderedDict()
        self._in_encoder_cache: set[str] = set()
        self._encoding: dict[str, Offer] = {}
        self._revisited: dict[str, Offer] = {}
        self._unshared: dict[str, str] = {}

    def encoded(self, key: str, rows: int, modality: str) -> None:
        """The engine encodes this item in the step being scheduled."""
        self._in_encoder_cache.add(key)
        offer = self._offer(key, rows, modality)
        if offer is not None:
            self._encoding[key] = offer

    def cached(self, key: str) -> None:
        """The engine loads this item into its encoder cache."""
        self._in_encoder_cache.add(key)

    def pooled(self, key: str, nbytes: int, shape: tuple[int, ...]) -> None:
        """The item is in this engine's pool, wherever it came from."""
        self._remember(key, Offer(nbytes, shape))

    def visited(self, key: str, rows: int, modality: str) -> None:
        """A new request brings this item, which the engine may have encoded before."""
        if key in self._in_encoder_cache:
            offer = self._offer(key, rows, modality)
            if offer is not None:
                self._revisited[key] = offer

    def freed(self, keys: Iterable[str]) -> None:
        """These items left the engine's encoder cache."""
        self._in_encoder_cache.difference_update(keys)

    def take(self) -> list[ReserveItem]:
        """What to reserve room for in the step just scheduled; :meth:`settle` must follow."""
        wanted = self._revisited | self._encoding
        return [
            ReserveItem(key=key, nbytes=offer.nbytes, dtype=self._dtype, shape=list(offer.shape))
            for key, offer in wanted.items()
        ]

    def settle(self, answers: list[ReservedItem] | None, token: str, why_none: str) -> StepSaves:
        """Take the agent's answer to :meth:`take`; None: there is none, ``why_none`` (a label)."""
        wanted = self._revisited | self._encoding
        encoding, self._encoding, self._revisited = self._encoding, {}, {}
        outcome = StepSaves()
        for key, reason in self._unshared.items():
            outcome.refused[key] = (reason, "")
        self._unshared = {}
        if answers is None:
            for key in wanted:
                self._offered.pop(key, None)
                outcome.refused[key] = (why_none, "")
            return outcome
        for answer in answers:
            offer = wanted.get(answer.key)
            if offer is None:
                continue
            if answer.refused:
                self._offered.pop(answer.key, None)
                outcome.refused[answer.key] = ("no_room", answer.refused)
                continue
            self._remember(answer.key, offer)
            if not answer.held:
                place = Placement(
                    answer.key,
                    answer.generation,
                    list(answer.extents),
                    offer.nbytes,
                    self._dtype,
                    offer.shape,
                    token,
                )
                orders = outcome.saves if answer.key in encoding else outcome.republish
                orders[answer.key] = place
        return outcome

    def offer(self, key: str) -> Offer | None:
        """The item as a peer may fetch it, or None if it cannot be had here."""
        return self._offered.get(key)

    def forget(self) -> None:
        """The agent is down, or the weights changed: nothing may be announced."""
        self._offered.clear()

    def emptied(self) -> None:
        """The engine's encoder cache was emptied."""
        self._in_encoder_cache.clear()

    def _offer(self, key: str, rows: int, modality: str) -> Offer | None:
        width = self._widths.get(modality)
        reason = why_not_shared(key)
        if reason or not width:
            self._unshared[key] = reason or "no_width"
            return None
        return Offer(rows * width * self._itemsize, (rows, width))

    def _remember(self, key: str, offer: Offer) -> None:
        self._offered[key] = offer
        self._offered.move_to_end(key)
        if len(self._offered) > _REMEMBERED:
            self._offered.popitem(last=False)
