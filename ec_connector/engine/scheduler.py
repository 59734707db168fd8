# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler's process: decides per step what is saved, loaded and awaited.

Decisions are made by :class:`ec_connector.engine.intake.Intake` (items this engine
wants) and :class:`ec_connector.engine.offers.Offers` (items it has). Here they meet
vLLM's requests on one side and the agent on the other. Nothing waits, but for
two short and bounded moments: the agent's word on where to save, in a step that
encodes, and its next message, in a step that does nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from ec_connector.agent.link import EngineLink, LinkDown, LinkEvent, LinkUp
from ec_connector.engine._compat import (
    EngineFacts,
    ItemFields,
    engine_facts,
    watch_resets,
    watch_weights,
)
from ec_connector.engine.claims import Claim, Want
from ec_connector.engine.intake import Intake
from ec_connector.engine.offers import Offers, StepSaves
from ec_connector.engine.regions import Regions
from ec_connector.engine.step import StepMetadata, WorkerReport
from ec_connector.engine.tally import Tally
from ec_connector.engine.widths import Widths
from ec_connector.engine.wishes import wish
from ec_connector.engine.words import Words
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import (
    AskStats,
    DropAll,
    Failed,
    Fetch,
    Loaded,
    Ready,
    Refused,
    Release,
    Reserve,
    Reserved,
    ReservedItem,
    Stats,
    ToAgent,
    Welcome,
)
from ec_connector.ticket_file import load_tickets

logger = logging.getLogger("vllm.ec_connector.scheduler")

RESERVE_PATIENCE: Final = 0.5
"""Seconds a step that encodes waits for the agent to say where to save.

As a rule it takes 0.1 ms; on a host whose cores are all busy the agent may have to wait for
one. An agent that stays silent is waited for once, not in every step.
"""
IDLE_PATIENCE: Final = 0.001
"""Seconds a step with nothing to run waits for the agent's next message."""
STATS_INTERVAL: Final = 5.0
_PASSTHROUGH: Final = "prompt_embeds"
"""A modality without an encoder: its rows come with the request."""


class Link(Protocol):
    """What is used of :class:`ec_connector.agent.link.EngineLink`."""

    welcome: Welcome | None

    @property
    def up(self) -> bool: ...
    @property
    def endpoint(self) -> str: ...
    def start(self) -> Welcome: ...
    def poll(self) -> list[LinkEvent]: ...
    def wait(self, timeout: float) -> list[LinkEvent]: ...
    def send(self, message: ToAgent) -> bool: ...
    def identify(self, identity: Identity) -> None: ...
    def close(self) -> None: ...


class Fields(Protocol):
    """What is used of :class:`ec_connector.engine._compat.ItemFields`."""

    def has_media(self, feature: Any) -> bool: ...
    def announcements(self, features: Any) -> dict[str, dict[str, Any]]: ...


class SchedulerSide:
    """One engine's scheduler half.

    Args:
        facts: what this engine is.
        link: its agent, not started yet.
        fields: tells media from mere descriptions of it.
        clock: seconds, monotonic.

    Raises:
        AgentStartError: the agent did not come up; the text says why.
        ConfigError: the file of ``ticket_key`` cannot be used.
    """

    def __init__(
        self,
        facts: EngineFacts,
        link: Link,
        fields: Fields,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._link = link
        self._fields = fields
        self._clock = clock
        self._tickets = load_tickets(facts.settings.ticket_key)
        self._widths = Widths(facts.widths, facts.possible_widths)
        self._intake = Intake(facts.dtype, facts.settings.fetch_timeout, self._widths.fault)
        self._offers = Offers(facts.dtype, facts.widths)
        self._current: Claim | None = None
        self._polled = False
        self._step = 0
        self._returned = 0
        self._seq = 0
        self._owed_answer = 0
        self._close_step = 0
        self._freed: list[str] = []
        self._regions = Regions()
        self._tally = Tally()
        self._next_stats = 0.0
        self._words = Words(logger, self._tally, clock)
        self._closed = False
        self._resets = 0
        self._unwatch: list[Callable[[], None]] = []
        self._factors: dict[str, str] = {}
        self._greet(link.start())

    @classmethod
    def of(cls, vllm_config: Any) -> SchedulerSide:
        """For an engine with this configuration. Raises ConfigError, AgentStartError."""
        facts = engine_facts(vllm_config)
        link = EngineLink(facts.settings, facts.identity, serves=facts.serves)
        side = cls(facts, link, ItemFields(vllm_config.model_config))
        side._unwatch = [
            watch_resets(side.emptied),
            watch_weights(vllm_config, facts.identity, side.reweighed),
        ]
        return side

    # ── while requests are scheduled ─────────────────────────────────────────

    def ensure(self, request: Any, computed: int) -> bool:
        """Whether every item that ends after ``computed`` prompt tokens is settled."""
        if not self._polled:
            self._poll()
        claim = self._intake.claims.get(request.request_id)
        features = request.mm_features
        if claim is None or computed < claim.covered or len(features) != claim.count:
            claim = self._consider(request, features, computed)
        self._current = claim
        if claim.waiting or claim.failed:
            return False
        if not claim.visited:
            self._visit(claim, features)
        self._intake.mend(claim)
        return True

    def has_item(self, key: str) -> bool:
        """Whether the request looked at last can load this item.

        vLLM asks right after :meth:`ensure` for the same request, and names only
        the item. An identifier may stand for other content in another request.
        """
        return self._current is not None and key in self._current.held

    def allocated(self, request: Any, index: int) -> None:
        """Room in the encoder cache was given to an item: it is loaded, or encoded."""
        feature = request.mm_features[index]
        if feature.modality == _PASSTHROUGH:
            return
        key = feature.identifier
        claim = self._intake.claims.get(request.request_id)
        place = self._intake.load(claim, key) if claim is not None else None
        if place is not None:
            self._tally.add("loaded_items")
            self._tally.add("loaded_bytes", place.nbytes)
            self._offers.cached(key)
            return
        self._tally.add("encoded_items")
        if self._facts.is_producer:
            self._offers.encoded(key, feature.mm_position.get_num_embeds(), feature.modality)

    # ── once a step ──────────────────────────────────────────────────────────

    def build(self, output: Any) -> StepMetadata:
        """The orders for the step just scheduled."""
        self._step += 1
        if not self._polled:
            self._poll()
        delivered = self._facts.always_delivers or output.total_num_scheduled_tokens > 0
        freed = list(output.free_encoder_mm_hashes)
        self._offers.freed(freed)
        # Only a step that reaches the workers can save anything.
        saves = self._reserve() if delivered else StepSaves()
        loads = self._intake.take_loads(self._step, freed, delivered=delivered)
        self._flush()
        if self._intake.waiting and not output.total_num_scheduled_tokens:
            self._take(self._link.wait(IDLE_PATIENCE))
            self._flush()
        self._polled = False
        self._current = None
        self._freed += freed
        tokens = {place.token for place in (*saves.saves.values(), *saves.republish.values())}
        tokens |= {place.token for place in loads.values()}
        if self._link.up and self._link.welcome is not None:
            tokens.add(self._link.welcome.region.token)
        metadata = StepMetadata(
            step=self._step,
            endpoint=self._link.endpoint,
            regions=self._regions.show(tokens, self._step, delivered=delivered),
            saves=saves.saves,
            republish=saves.republish,
            loads=loads,
            freed=list(self._freed),
            close_step=self._close_step,
            resets=self._resets,
        )
        if delivered:
            self._freed, self._close_step = [], 0
        return metadata

    def take_unavailable(self) -> set[str]:
        """Requests to fail. vLLM asks once for every step that has come back."""
        self._returned += 1
        self._intake.step_returned(self._returned)
        self._flush()  # there may be no other step for a long time
        failed, self._intake.unavailable = self._intake.unavailable, set()
        return failed

    def worker_report(self, report: WorkerReport) -> None:
        """What the workers of a step found."""
        for key, message in report.failed_loads.items():
            logger.error("Loading item %s failed on a worker: %s", key, message)
            self._intake.lost(key, message)
        if report.resets > self._resets:
            self._resets = report.resets
            self._forget()
        self._tell_outcomes()

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request ended. Returns what to announce to whoever sent it."""
        self._intake.finish(request.request_id)
        if not self._facts.is_producer or not request.mm_features:
            return None
        entries = self._fields.announcements(request.mm_features)
        for feature in request.mm_features:
            if feature.identifier in entries:
                self._announce(entries[feature.identifier], feature)
        return entries or None

    def stats(self) -> dict[str, Any] | None:
        """What was counted since the last call, as :meth:`ec_connector.engine.tally.Tally.take`."""
        return self._tally.take()

    def close(self) -> None:
        """End the agent. Idempotent."""
        if not self._closed:
            self._closed = True
            for unwatch in self._unwatch:
                unwatch()
            self._link.close()

    def emptied(self) -> None:
        """vLLM emptied the encoder cache, as it does when weights change: drop what is of before.

        The workers find out by themselves, but only in the step in which the first load would
        already be wrong.
        """
        self._resets += 1
        self._forget()

    def reweighed(self, identity: Identity) -> None:
        """The engine's weights change: drop what is of before, and let peers see the difference."""
        self._factors = identity.factors
        self._link.identify(identity)
        self.emptied()

    # ── requests ─────────────────────────────────────────────────────────────

    def _consider(self, request: Any, features: Sequence[Any], computed: int) -> Claim:
        claim = self._intake.claim(request.request_id)
        now = self._clock()
        for feature in features:
            end = feature.mm_position.offset + feature.mm_position.length
            if feature.modality != _PASSTHROUGH and end > computed:
                self._intake.want(claim, self._want(request, feature), now)
        claim.covered, claim.count, claim.visited = computed, len(features), False
        self._tell_outcomes()
        return claim

    def _visit(self, claim: Claim, features: Sequence[Any]) -> None:
        """Have items published that this engine need not encode, so nothing else will."""
        claim.visited = True
        if not self._facts.is_producer:
            return
        for feature in features:
            place = self._intake.place(claim, feature.identifier)
            if place is not None:
                self._offers.pooled(place.key, place.nbytes, place.shape)
            elif feature.modality != _PASSTHROUGH:
                rows = feature.mm_position.get_num_embeds()
                self._offers.visited(feature.identifier, rows, feature.modality)

    def _want(self, request: Any, feature: Any) -> Want:
        has_media = self._fields.has_media(feature)
        if not self._facts.is_consumer:
            rows = feature.mm_position.get_num_embeds()
            return Want(feature.identifier, rows, feature.modality, has_media, ask=False)
        return wish(
            feature,
            request.ec_transfer_params,
            self._facts.dtype,
            has_media=has_media,
            in_pool=self._may_be_in_pool,
        )

    def _may_be_in_pool(self, key: str) -> bool:
        shared = bool(self._facts.settings.agent)
        return shared or self._intake.seen(key) or self._offers.offer(key) is not None

    def _announce(self, entry: dict[str, Any], feature: Any) -> None:
        if "peer_host" in entry:
            return  # the same item again
        entry["modality"] = feature.modality
        offer = self._offers.offer(feature.identifier)
        welcome = self._link.welcome if self._link.up else None
        rows = feature.mm_position.get_num_embeds()
        if offer is None or welcome is None or not welcome.peer_port or offer.shape[0] != rows:
            entry["metadata"] = {}
            return
        entry.update(
            peer_host=welcome.peer_host,
            peer_port=welcome.peer_port,
            size_bytes=offer.nbytes,
            shape=list(offer.shape),
            dtype=self._facts.dtype,
        )
        if self._tickets is not None:
            entry["ticket"] = self._tickets.sign(
                feature.identifier,
                welcome.peer_host,
                welcome.peer_port,
                offer.nbytes,
                self._facts.dtype,
                offer.shape,
            )
        self._tally.add("announced_items")

    # ── the agent ────────────────────────────────────────────────────────────

    def _reserve(self) -> StepSaves:
        items = self._offers.take()
        answers: list[ReservedItem] | None = None
        token, why = "", "agent_down"
        if items and self._link.up:
            why = "agent_slow"
            if not self._owed_answer:
                self._seq += 1
                if self._link.send(Reserve(seq=self._seq, step=self._step, items=items)):
                    self._owed_answer = self._seq
                    self._close_step = self._step
                    answers = self._await_reserved(self._seq)
            welcome = self._link.welcome
            token = welcome.region.token if welcome is not None else ""
        saves = self._offers.settle(answers, token, why)
        self._words.saves(saves)
        return saves

    def _await_reserved(self, seq: int) -> list[ReservedItem] | None:
        until = self._clock() + RESERVE_PATIENCE
        while self._owed_answer and (left := until - self._clock()) > 0:
            found = self._take(self._link.wait(left), seq)
            if found is not None:
                return found.items
        return None

    def _poll(self) -> None:
        self._polled = True
        self._take(self._link.poll())
        now = self._clock()
        self._intake.expire(now)
        self._tell_outcomes()
        if now >= self._next_stats and self._link.up:
            self._next_stats = now + STATS_INTERVAL
            reasons = {name: dict(counts) for name, counts in self._tally.totals.items()}
            self._link.send(AskStats(reasons=reasons))

    def _take(self, events: list[LinkEvent], seq: int = 0) -> Reserved | None:
        """Act on what the agent said; returns the answer to reservation ``seq``."""
        found = None
        now = self._clock()
        for event in events:
            if isinstance(event, Reserved):
                self._owed_answer = 0
                found = event if event.seq == seq else found
            elif isinstance(event, Ready):
                self._ready(event, now)
            elif isinstance(event, Failed):
                self._intake.failed(event, now)
            elif isinstance(event, Stats):
                self._tally.note_agent(event.values, event.links)
                self._tally.gauges["waiting_items"] = self._intake.waiting
            elif isinstance(event, Refused):
                logger.error("The agent refused a message: %s", event.message)
            elif isinstance(event, LinkDown):
                self._down(event.reason, now)
            elif isinstance(event, LinkUp):
                self._tally.add("agent_restarts")
                self._greet(event.welcome)
        self._tell_outcomes()
        return found

    def _ready(self, event: Ready, now: float) -> None:
        welcome = self._link.welcome
        token = welcome.region.token if welcome is not None else ""
        waited = self._intake.ready(event, token, now)
        if waited is None:
            return
        self._tally.observe("fetch_time", waited)
        self._tally.add("fetched_items")
        self._tally.add("fetched_bytes", event.nbytes)
        if event.plane == "pool":
            self._tally.add("hit_items")

    def _greet(self, welcome: Welcome) -> None:
        self._regions.add(welcome.region)
        self._intake.agent_up()
        self._owed_answer = 0
        self._tally.new_agent()
        if self._factors:
            # It may have been started just before they changed.
            self._link.send(DropAll(self._factors))
        logger.info(
            "Agent %s (pid %d) serves %s",
            welcome.agent_id,
            welcome.agent_pid,
            f"at {welcome.peer_host}:{welcome.peer_port}" if welcome.peer_port else "this engine",
        )

    def _down(self, reason: str, now: float) -> None:
        self._owed_answer = 0
        self._offers.forget()
        self._intake.agent_down(reason, self._regions.mapped(self._returned), now)
        self._tally.gauges["agent_up"] = 0

    def _flush(self) -> None:
        """Send what was decided; releases first, so that a new wish for an item counts."""
        if self._intake.loaded:
            self._link.send(Loaded(self._intake.loaded))
            self._intake.loaded = []
        if self._intake.releases:
            self._link.send(Release(self._intake.releases))
            self._intake.releases = []
        if self._intake.fetches:
            self._link.send(Fetch(list(self._intake.fetches.values())))
            self._intake.fetches = {}

    def _forget(self) -> None:
        logger.info("Saved encoder outputs are dropped: the encoder cache was reset")
        self._intake.forget()
        self._offers.forget()
        self._offers.emptied()
        self._link.send(DropAll(self._factors))

    def _tell_outcomes(self) -> None:
        if self._intake.outcomes:
            outcomes, self._intake.outcomes = self._intake.outcomes, []
            for outcome in outcomes:
                # A producer encodes everything: that is no news.
                if self._facts.is_consumer or not outcome.local:
                    self._words.outcome(outcome)
