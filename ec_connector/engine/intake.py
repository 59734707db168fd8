# SPDX-License-Identifier: Apache-2.0
"""Consumer side of the scheduler: which request waits for which item, and how each wait ends.

Pure: events in, messages to send and outcomes out, the clock passed in. Every
item that a request needs ends, by a deadline of its own, in one of

* **held**: in the pool and pinned, so the workers can be told to load it;
* **local**: the media is on the request and this engine encodes it;
* **failed**: there is no media either, so the request is given up.

What a request holds stays held until the request is finished, because a
preempted one needs it again; and until every step that was told to load it has
returned, because a worker may still be copying.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ec_connector.engine.claims import Claim, Item, Outcome, Want, fault_of
from ec_connector.engine.step import Placement
from ec_connector.protocol.deadlines import Deadlines
from ec_connector.protocol.local import Failed, FetchItem, Ready

ANSWER_GRACE: Final = 0.5
"""Seconds after an item's deadline in which the agent may still say that it is late."""
_WORTH_ASKING: Final = 0.05
_NOT_DELIVERED: Final = sys.maxsize
_REMEMBERED: Final = 65536


class Intake:
    """The items and requests of one consuming engine.

    Args:
        dtype: element type every item must have, without ``torch.``.
        timeout: seconds a request waits for one item.
        width_fault: says what is wrong with a row width for a modality, or "".
    """

    def __init__(self, dtype: str, timeout: float, width_fault: Callable[[str, int], str]) -> None:
        self._dtype = dtype
        self._timeout = timeout
        self._width_fault = width_fault
        self._items: dict[str, Item] = {}
        self._waiting: Deadlines[str] = Deadlines()
        self._lingering: set[str] = set()
        self._spoiled: set[str] = set()
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._loads: dict[str, Placement] = {}
        self._loading: set[str] = set()
        self._returned = 0
        self._down = ""
        self.claims: dict[str, Claim] = {}
        self.fetches: dict[str, FetchItem] = {}
        self.releases: list[str] = []
        self.loaded: list[str] = []
        self.outcomes: list[Outcome] = []
        self.unavailable: set[str] = set()

    # ── requests ─────────────────────────────────────────────────────────────

    def claim(self, request_id: str) -> Claim:
        """The record of a request, made at its first appearance."""
        claim = self.claims.get(request_id)
        if claim is None:
            claim = self.claims[request_id] = Claim(request_id)
        return claim

    def want(self, claim: Claim, want: Want, now: float) -> None:
        """A request needs an item: held at once, waited for, or settled without it."""
        known = claim.wants.get(want.key)
        if known is not None and (want.key in claim.held or want.key in claim.waiting):
            if known.rows != want.rows:
                text = f"the request wants it with {known.rows} and with {want.rows} rows"
                self._give_up(claim, want, "mismatch", text)
            return
        if want.key in claim.local:
            return
        if want.key in self._spoiled:
            # The encoder would not run: its cache seems to have the item, but holds zeros.
            want = replace(want, has_media=False, ask=True)
        claim.wants[want.key] = want
        self._ask(claim, want, now, now + self._timeout)

    def finish(self, request_id: str) -> None:
        """A request ended, however it did: it holds nothing any more."""
        claim = self.claims.pop(request_id, None)
        self.unavailable.discard(request_id)
        if claim is None:
            return
        for key in claim.waiting | claim.held:
            item = self._items.get(key)
            if item is not None:
                item.holders.pop(request_id, None)
                self._let_go(item)

    # ── steps ────────────────────────────────────────────────────────────────

    def mend(self, claim: Claim) -> None:
        """Load again what this request holds and a worker has only zeros for."""
        for key in claim.held & self._spoiled if self._spoiled else ():
            self.load(claim, key)

    def load(self, claim: Claim, key: str) -> Placement | None:
        """A held item is to be loaded by the workers with the next step; None: it is not held."""
        place = self.place(claim, key)
        if place is not None:
            self._loads[key] = place
            self._items[key].busy_until = _NOT_DELIVERED
        return place

    def place(self, claim: Claim, key: str) -> Placement | None:
        """Where an item lies that this request holds."""
        item = self._items.get(key) if key in claim.held else None
        return item.placement if item is not None else None

    def seen(self, key: str) -> bool:
        """Whether the item was in this engine's pool some time, and so may still be."""
        return key in self._seen

    def take_loads(self, step: int, freed: list[str], *, delivered: bool) -> dict[str, Placement]:
        """The loads for a step's metadata.

        Unless the step's metadata is sure to be ``delivered`` to the workers
        they are kept for the next step as well; loading twice does no harm.
        """
        for key in freed:
            self._spoiled.discard(key)
            if self._loads.pop(key, None) is not None:
                self._not_busy(key, 0)
        loads = self._loads
        if delivered:
            self._loads = {}
            for key in loads:
                self._not_busy(key, step)
            self._loading |= loads.keys()
            self._spoiled -= loads.keys()
            return loads
        return dict(loads)

    def step_returned(self, step: int) -> None:
        """All of the engine's work up to this step is done on every worker."""
        self._returned = step
        for key in list(self._loading):
            item = self._items.get(key)
            if item is None or item.busy_until <= step:
                self._loading.discard(key)
                self.loaded.append(key)
        for key in list(self._lingering):
            self._let_go(self._items[key])

    @property
    def waiting(self) -> int:
        """Items that are being waited for."""
        return len(self._waiting)

    # ── answers ──────────────────────────────────────────────────────────────

    def ready(self, answer: Ready, token: str, now: float) -> float | None:
        """An item is in the pool. Returns the seconds it was waited for; None if unwanted."""
        item = self._items.get(answer.key)
        if item is None:
            return None
        if fault := self._fault(item, answer):
            self._fail(item, "mismatch", fault, answer.peer, now)
            self.releases.append(answer.key)
            return None
        first = item.placement is None
        item.placement = Placement(
            answer.key,
            answer.generation,
            list(answer.extents),
            answer.nbytes,
            answer.dtype,
            tuple(answer.shape),
            token,
        )
        self._waiting.cancel(answer.key)
        self._seen[answer.key] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        for request_id in item.holders:
            claim = self.claims[request_id]
            claim.waiting.discard(answer.key)
            claim.held.add(answer.key)
        return now - item.asked_at if first else None

    def failed(self, answer: Failed, now: float) -> None:
        """An item cannot be had from where it was asked."""
        item = self._items.get(answer.key)
        if item is not None and item.placement is None:
            named = f" (factor {answer.factor})" if answer.factor else ""
            self._fail(item, answer.reason, answer.message + named, answer.peer, now)

    def expire(self, now: float) -> None:
        """Give up items that the agent never answered for."""
        for key in self._waiting.due(now):
            item = self._items[key]
            self.releases.append(key)
            text = f"the agent gave no answer for {now - item.asked_at:.1f} s"
            self._fail(item, "agent_unresponsive", text, "", now)

    # ── changes of state ─────────────────────────────────────────────────────

    def agent_down(self, why: str, mapped: set[str], now: float) -> None:
        """The agent is gone: what was on its way is not coming.

        Items in a region that the workers have ``mapped`` (by token) stay
        readable; others are lost, unless a step under way is loading them.
        """
        self._down = why
        self.fetches.clear()
        self.releases.clear()
        for item in list(self._items.values()):
            lost = item.placement is None or item.placement.token not in mapped
            if lost and item.busy_until <= self._returned:
                self._fail(item, "agent_down", why, "", now)

    def agent_up(self) -> None:
        """The agent is back, with an empty pool."""
        self._down = ""

    def forget(self) -> None:
        """The weights changed: what is held is asked for again before it is loaded."""
        for item in list(self._items.values()):
            if item.placement is None or item.busy_until > self._returned:
                continue
            for request_id in item.holders:
                claim = self.claims[request_id]
                claim.held.discard(item.key)
                claim.covered = sys.maxsize
            self._remove(item)
            self.releases.append(item.key)

    def lost(self, key: str, message: str) -> None:
        """A worker could not load a promised item and has zeros in its place.

        Requests that hold it are given up; others get it afresh or fail.
        """
        self._spoiled.add(key)
        item = self._items.get(key)
        if item is None:
            return
        for request_id, (want, _) in item.holders.items():
            claim = self.claims[request_id]
            claim.held.discard(key)
            self._give_up(claim, want, "load_failed", message)
        self._remove(item)
        self.releases.append(key)

    # ── inside ───────────────────────────────────────────────────────────────

    def _ask(self, claim: Claim, want: Want, now: float, deadline: float) -> None:
        item = self._items.get(want.key)
        if item is not None and item.rows == want.rows:
            item.holders[claim.request_id] = (want, deadline)
            self._lingering.discard(want.key)
            (claim.held if item.placement is not None else claim.waiting).add(want.key)
        elif item is not None:
            text = f"{want.rows} rows are expected, another request expects {item.rows}"
            self._miss(claim, want, "mismatch", text, "")
        elif want.fault:
            self._miss(claim, want, want.fault, want.fault_text, str(want.source or ""))
        elif not want.ask:
            self._miss(claim, want, "missing", "not announced", "")
        elif self._down:
            self._miss(claim, want, "agent_down", self._down, str(want.source or ""))
        else:
            self._fetch(claim, want, now, deadline)

    def _fetch(self, claim: Claim, want: Want, now: float, deadline: float) -> None:
        source = want.source
        item = Item(want.key, source, want.rows, now)
        item.holders[claim.request_id] = (want, deadline)
        claim.waiting.add(want.key)
        self._items[want.key] = item
        self._waiting.set(want.key, deadline + ANSWER_GRACE)
        self.fetches[want.key] = FetchItem(
            key=want.key,
            timeout_ms=max(1, round((deadline - now) * 1000)),
            peer_host=source.host if source else "",
            peer_port=source.port if source else 0,
            nbytes=source.nbytes if source else 0,
            dtype=self._dtype,
            shape=list(source.shape) if source else [],
            ticket=source.ticket if source else "",
        )

    def _fault(self, item: Item, answer: Ready) -> str:
        fault = fault_of(answer, item.rows, self._dtype)
        if fault:
            return fault
        modalities = {want.modality for want, _ in item.holders.values()}
        faults = (self._width_fault(kind, answer.shape[1]) for kind in sorted(modalities))
        return next(filter(None, faults), "")

    def _fail(self, item: Item, reason: str, message: str, peer: str, now: float) -> None:
        """End an item; requests that know another source, or have time left, ask again."""
        self._remove(item)
        source = str(item.source or "")
        for request_id, (want, deadline) in item.holders.items():
            claim = self.claims[request_id]
            claim.waiting.discard(item.key)
            claim.held.discard(item.key)
            late = reason == "deadline" and deadline - now > _WORTH_ASKING
            if late or (want.source != item.source and reason != "agent_down"):
                self._ask(claim, want, now, deadline)
            else:
                self._miss(claim, want, reason, message, peer or source)

    def _miss(self, claim: Claim, want: Want, reason: str, message: str, peer: str) -> None:
        if not want.has_media:
            self._give_up(claim, want, reason, message, peer)
            return
        claim.local.add(want.key)
        expected = want.source is None and not want.fault and reason == "missing"
        self.outcomes.append(
            Outcome(claim.request_id, want.key, peer, reason, message, True, expected)
        )

    def _give_up(self, claim: Claim, want: Want, reason: str, message: str, peer: str = "") -> None:
        if claim.failed:
            return
        claim.failed = True
        self.unavailable.add(claim.request_id)
        self.outcomes.append(Outcome(claim.request_id, want.key, peer, reason, message, False))

    def _let_go(self, item: Item) -> None:
        """End an item that nobody holds, as soon as no step is loading it."""
        if item.holders:
            return
        if item.placement is None:
            if self.fetches.pop(item.key, None) is None:
                self.releases.append(item.key)
        elif item.busy_until > self._returned:
            self._lingering.add(item.key)
            return
        else:
            self.releases.append(item.key)
        self._remove(item)

    def _remove(self, item: Item) -> None:
        self._items.pop(item.key, None)
        self._waiting.cancel(item.key)
        self._lingering.discard(item.key)

    def _not_busy(self, key: str, step: int) -> None:
        item = self._items.get(key)
        if item is not None:
            item.busy_until = step
