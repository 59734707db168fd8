# SPDX-License-Identifier: Apache-2.0
"""The scheduler half against a scripted agent and stand-ins for vLLM's requests."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ec_connector.agent.link import LinkDown, LinkEvent, LinkUp
from ec_connector.config import Settings
from ec_connector.engine._compat import EngineFacts
from ec_connector.engine.scheduler import RESERVE_PATIENCE, SchedulerSide
from ec_connector.engine.step import StepMetadata, WorkerReport
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import (
    DropAll,
    Failed,
    Fetch,
    Ready,
    Release,
    Reserve,
    Reserved,
    ReservedItem,
    Stats,
    StepDone,
    ToAgent,
    Welcome,
)
from ec_connector.protocol.messages import RegionRef
from ec_connector.protocol.tickets import Tickets

ROWS, WIDTH = 4, 8
NBYTES = ROWS * WIDTH * 2


@dataclass
class Position:
    offset: int = 1
    length: int = ROWS

    def get_num_embeds(self) -> int:
        return self.length


@dataclass
class Feature:
    identifier: str
    data: Any = "pixels"
    modality: str = "image"
    mm_position: Position = field(default_factory=Position)


@dataclass
class Req:
    request_id: str
    mm_features: list[Feature]
    ec_transfer_params: Any = None


@dataclass
class Output:
    total_num_scheduled_tokens: int = 1
    free_encoder_mm_hashes: list[str] = field(default_factory=list)


class ScriptedFields:
    """Says that an item has media when its data is ``"pixels"``."""

    def has_media(self, feature: Any) -> bool:
        return bool(feature.data == "pixels")

    def announcements(self, features: Any) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for index, feature in enumerate(features):
            entry = entries.setdefault(feature.identifier, {"item_indices": []})
            entry["metadata"] = {"grid": [1]}
            entry["item_indices"].append(index)
        return entries


class ScriptedLink:
    """An agent that answers what the test says, when the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[ToAgent] = []
        self.inbox: list[LinkEvent] = []
        self.answer: Callable[[ToAgent], list[LinkEvent]] = lambda _message: []
        self.up = True
        self.polls = 0
        self.endpoint = "ipc://agent"
        self.welcome: Welcome | None = welcome("r1")
        self.identity = Identity()

    def start(self) -> Welcome:
        assert self.welcome is not None
        return self.welcome

    def poll(self) -> list[LinkEvent]:
        self.polls += 1
        events, self.inbox = self.inbox, []
        return events

    def wait(self, timeout: float) -> list[LinkEvent]:
        if not self.inbox:
            self.now += timeout
        return self.poll()

    def send(self, message: ToAgent) -> bool:
        if self.up:
            self.sent.append(message)
            self.inbox += self.answer(message)
        return self.up

    def identify(self, identity: Identity) -> None:
        self.identity = identity

    def close(self) -> None:
        self.up = False

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def welcome(token: str) -> Welcome:
    region = RegionRef(pid=1, fd=3, nbytes=1 << 20, block_bytes=4096, token=token)
    return Welcome("agent", 1, region, "10.0.0.9", 5000)


def side(role: str, link: ScriptedLink, settings: Settings | None = None) -> SchedulerSide:
    facts = EngineFacts(
        settings=settings or Settings(),
        identity=Identity(),
        is_producer=role in ("producer", "both"),
        is_consumer=role in ("consumer", "both"),
        dtype="bfloat16",
        widths={} if role == "consumer" else {"image": WIDTH},
        possible_widths=frozenset({WIDTH}),
        always_delivers=role == "producer",
    )
    return SchedulerSide(facts, link, ScriptedFields(), lambda: link.now)


def reserve_all(message: ToAgent) -> list[LinkEvent]:
    if not isinstance(message, Reserve):
        return []
    items = [ReservedItem(item.key, 7, [(1, 1)]) for item in message.items]
    return [Reserved(message.seq, items)]


def announcement(key: str, **change: Any) -> dict[str, Any]:
    entry = {
        "peer_host": "127.0.0.1",
        "peer_port": 9,
        "size_bytes": NBYTES,
        "shape": [ROWS, WIDTH],
    }
    return {key: entry | change}


def ready(key: str, plane: str = "zmq") -> Ready:
    return Ready(key, 7, [(3, 1)], NBYTES, "bfloat16", [ROWS, WIDTH], plane, "127.0.0.1:9")


def step(scheduler: SchedulerSide, tokens: int = 1, freed: tuple[str, ...] = ()) -> StepMetadata:
    return scheduler.build(Output(tokens, list(freed)))


def counted(scheduler: SchedulerSide) -> dict[str, Any]:
    return scheduler.stats() or {"counts": {}, "reasons": {}}


# ── consumer ─────────────────────────────────────────────────────────────────


def test_consumer_waits_then_loads_then_releases() -> None:
    """The whole life of an item on a consumer: deferred, fetched, loaded, let go."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a", data=None)], announcement("a"))
    assert not scheduler.ensure(request, 0)
    step(scheduler, tokens=0)
    (fetch,) = link.of(Fetch)
    assert (fetch.items[0].key, fetch.items[0].nbytes, fetch.items[0].shape) == (
        "a",
        NBYTES,
        [ROWS, WIDTH],
    )
    scheduler.take_unavailable()
    link.inbox.append(ready("a"))
    assert scheduler.ensure(request, 0)
    assert scheduler.has_item("a")
    scheduler.allocated(request, 0)
    metadata = step(scheduler)
    assert list(metadata.loads) == ["a"]
    assert [ref.token for ref in metadata.regions] == ["r1"]
    assert scheduler.finished(request) is None
    assert not link.of(Release)
    scheduler.take_unavailable()
    # At once: an engine without requests makes no other step.
    assert link.of(Release)[0].keys == ["a"]
    counts = counted(scheduler)["counts"]
    assert (counts["loaded_items"], counts["loaded_bytes"]) == (1, NBYTES)
    assert counts["fetched_items"] == 1
    assert "encoded_items" not in counts


def test_an_item_covered_by_the_prefix_cache_is_not_fetched() -> None:
    """Items that end before the computed tokens are neither asked for nor waited for."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a", data=None)], announcement("a"))
    assert scheduler.ensure(request, 1 + ROWS)
    step(scheduler)
    assert not link.of(Fetch)


def test_a_preempted_request_looks_again_at_what_its_prefix_covered() -> None:
    """With fewer computed tokens than before, items that were not needed are."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a", data=None)], announcement("a"))
    assert scheduler.ensure(request, 1 + ROWS)
    step(scheduler)
    assert not scheduler.ensure(request, 0)
    step(scheduler)
    assert [item.key for item in link.of(Fetch)[0].items] == ["a"]


def test_media_of_a_later_turn_is_noticed() -> None:
    """A session that grows by an item is looked at again, however far it has come."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a")], None)
    assert scheduler.ensure(request, 0)
    request.mm_features.append(Feature("b", data=None, mm_position=Position(50)))
    assert not scheduler.ensure(request, 40)


def test_all_items_of_a_step_travel_in_one_message() -> None:
    """Several requests' items are asked for together, at the end of the pass."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    for number in range(3):
        scheduler.ensure(Req(f"r{number}", [Feature(f"k{number}")], announcement(f"k{number}")), 0)
    assert not link.of(Fetch)
    step(scheduler, tokens=0)
    assert [[item.key for item in fetch.items] for fetch in link.of(Fetch)] == [["k0", "k1", "k2"]]


def test_a_failed_fetch_with_media_is_a_counted_local_encode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The request goes on, the item is encoded, and both metric and log say why."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a")], announcement("a"))
    scheduler.ensure(request, 0)
    link.inbox.append(Failed("a", "peer_unreachable", "no connection", peer="127.0.0.1:9"))
    with caplog.at_level(logging.WARNING, "vllm.ec_connector"):
        step(scheduler, tokens=0)
    assert scheduler.ensure(request, 0)
    assert not scheduler.has_item("a")
    scheduler.allocated(request, 0)
    assert scheduler.take_unavailable() == set()
    found = counted(scheduler)
    assert found["reasons"]["fallback_items"] == {"peer_unreachable": 1}
    assert found["counts"]["encoded_items"] == 1
    text = caplog.text
    assert all(word in text for word in ("r", "a", "127.0.0.1:9", "peer_unreachable"))


def test_a_failed_fetch_without_media_fails_the_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The request never reaches the model; vLLM is told once, with one log line."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a", data=None)], announcement("a"))
    scheduler.ensure(request, 0)
    link.inbox.append(Failed("a", "missing", "evicted", peer="127.0.0.1:9"))
    with caplog.at_level(logging.WARNING, "vllm.ec_connector"):
        step(scheduler, tokens=0)
    assert not scheduler.ensure(request, 0)
    assert scheduler.take_unavailable() == {"r"}
    assert scheduler.take_unavailable() == set()
    assert counted(scheduler)["reasons"]["failed_requests"] == {"missing": 1}
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_metadata_only_without_any_announcement_never_reaches_the_model() -> None:
    """It would end the engine: the pool is asked, and then the request fails."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a", data=None)])
    assert not scheduler.ensure(request, 0)
    step(scheduler, tokens=0)
    assert link.of(Fetch)[0].items[0].peer_host == ""
    link.inbox.append(Failed("a", "missing", "not in this engine's pool"))
    assert not scheduler.ensure(request, 0)
    step(scheduler, tokens=0)
    assert scheduler.take_unavailable() == {"r"}


def test_a_producer_refuses_an_item_without_media() -> None:
    """Nothing to encode and nobody to ask: the request fails instead of the engine."""
    link = ScriptedLink()
    scheduler = side("producer", link)
    assert not scheduler.ensure(Req("r", [Feature("a", data=None)]), 0)
    assert scheduler.take_unavailable() == {"r"}


def test_a_wrong_announcement_is_refused_before_asking() -> None:
    """Rows that differ from the prompt's placeholder are a mismatch, whatever the peer says."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    change = {"shape": [ROWS + 1, WIDTH], "size_bytes": (ROWS + 1) * WIDTH * 2}
    request = Req("r", [Feature("a")], announcement("a", **change))
    assert scheduler.ensure(request, 0)
    step(scheduler)
    assert not link.of(Fetch)
    assert counted(scheduler)["reasons"]["fallback_items"] == {"mismatch": 1}


def test_a_request_local_identifier_is_never_fetched() -> None:
    """A number that another process gave out is a counted fallback, not a key."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    key = "renderer0-mm-1-image-0"
    assert scheduler.ensure(Req("r", [Feature(key)], announcement(key)), 0)
    step(scheduler)
    assert not link.of(Fetch)
    assert counted(scheduler)["reasons"]["fallback_items"] == {"request_local": 1}


def test_plain_media_asks_nobody() -> None:
    """Without an announcement, and never seen before, an item is encoded at once."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    assert scheduler.ensure(Req("r", [Feature("a")]), 0)
    step(scheduler)
    assert not link.of(Fetch)
    found = counted(scheduler)
    assert found["counts"]["unannounced_media_items"] == 1
    assert not found["reasons"]


def test_what_was_fetched_once_is_looked_for_in_the_pool() -> None:
    """The same picture later, unannounced, is taken out of this engine's own pool."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    first = Req("r1", [Feature("a")], announcement("a"))
    scheduler.ensure(first, 0)
    step(scheduler, tokens=0)
    link.inbox.append(ready("a"))
    scheduler.ensure(first, 0)
    step(scheduler)
    scheduler.take_unavailable()
    scheduler.take_unavailable()
    scheduler.finished(first)
    step(scheduler)
    again = Req("r2", [Feature("a")])
    assert not scheduler.ensure(again, 0)
    step(scheduler, tokens=0)
    assert link.of(Fetch)[1].items[0].peer_host == ""
    link.inbox.append(ready("a", "pool"))
    assert scheduler.ensure(again, 0)
    assert counted(scheduler)["counts"]["hit_items"] == 1


def test_an_item_is_only_loadable_for_the_request_that_checked_it() -> None:
    """vLLM asks by identifier alone; another request's rows are not an answer."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    one = Req("one", [Feature("a")], announcement("a"))
    two = Req("two", [Feature("a", mm_position=Position(1, ROWS + 1))])
    scheduler.ensure(one, 0)
    step(scheduler, tokens=0)
    link.inbox.append(ready("a"))
    assert scheduler.ensure(two, 0)
    assert not scheduler.has_item("a")
    assert scheduler.ensure(one, 0)
    assert scheduler.has_item("a")


def test_an_unanswered_item_ends_by_its_deadline() -> None:
    """A stopped agent costs the deadline, not the request."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a")], announcement("a"))
    scheduler.ensure(request, 0)
    step(scheduler, tokens=0)
    link.now += Settings().fetch_timeout + 1
    assert scheduler.ensure(request, 0)
    assert counted(scheduler)["reasons"]["fallback_items"] == {"agent_unresponsive": 1}


def test_the_agents_death_ends_waits_and_its_return_resumes() -> None:
    """Waiting items fall back, later ones too, and after the restart they are fetched."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a")], announcement("a"))
    scheduler.ensure(request, 0)
    step(scheduler, tokens=0)
    link.up, link.inbox = False, [LinkDown("killed")]
    assert scheduler.ensure(request, 0)
    assert scheduler.ensure(Req("r2", [Feature("b")], announcement("b")), 0)
    step(scheduler)
    assert counted(scheduler)["reasons"]["fallback_items"] == {"agent_down": 2}
    link.up, link.welcome = True, welcome("r2")
    link.inbox = [LinkUp(link.welcome)]
    assert not scheduler.ensure(Req("r3", [Feature("c")], announcement("c")), 0)
    metadata = step(scheduler)
    assert [ref.token for ref in metadata.regions] == ["r2"]
    assert counted(scheduler)["counts"]["agent_restarts"] == 1


def test_a_held_item_survives_the_agent_if_its_region_is_mapped() -> None:
    """Rows that are in memory the workers have mapped are loaded although the agent is dead."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    step(scheduler)  # shows the region to the workers
    scheduler.take_unavailable()
    request = Req("r", [Feature("a", data=None)], announcement("a"))
    scheduler.ensure(request, 0)
    step(scheduler, tokens=0)
    link.inbox.append(ready("a"))
    scheduler.ensure(request, 0)
    link.up, link.inbox = False, [LinkDown("killed")]
    step(scheduler, tokens=0)
    assert scheduler.ensure(request, 0)
    scheduler.allocated(request, 0)
    metadata = step(scheduler)
    assert metadata.loads["a"].token == "r1"
    assert [ref.token for ref in metadata.regions] == ["r1"]


def test_what_workers_never_see_is_said_again() -> None:
    """Loads, freed items and the region of a step without tokens come with the next one."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a")], announcement("a"))
    scheduler.ensure(request, 0)
    step(scheduler, tokens=0)
    link.inbox.append(ready("a"))
    scheduler.ensure(request, 0)
    scheduler.allocated(request, 0)
    step(scheduler, tokens=0, freed=("x",))
    metadata = step(scheduler, freed=("y",))
    assert list(metadata.loads) == ["a"]
    assert metadata.freed == ["x", "y"]
    assert step(scheduler).freed == []


def test_a_worker_that_could_not_load_fails_the_request() -> None:
    """The last resort: zeros were used, so the answer is thrown away with the request."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a")], announcement("a"))
    scheduler.ensure(request, 0)
    step(scheduler, tokens=0)
    link.inbox.append(ready("a"))
    scheduler.ensure(request, 0)
    scheduler.allocated(request, 0)
    step(scheduler)
    scheduler.worker_report(WorkerReport(failed_loads={"a": "torn"}))
    assert scheduler.take_unavailable() == {"r"}
    assert counted(scheduler)["reasons"]["failed_requests"] == {"load_failed": 1}


def test_reports_of_ranks_add_up() -> None:
    """One rank's failure is everybody's."""
    both = WorkerReport({"a": "x"}).aggregate(WorkerReport({"b": "y"}, resets=1))
    assert both.failed_loads == {"a": "x", "b": "y"}
    assert both.resets == 1


def test_500_waiting_requests_poll_once_and_look_at_no_item() -> None:
    """While nothing changes a waiting request costs one table look-up, and no message."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    looked = 0

    class Counting(list[Feature]):
        def __iter__(self) -> Any:
            nonlocal looked
            looked += 1
            return super().__iter__()

    requests = [
        Req(f"r{n}", Counting([Feature(f"k{n}")]), announcement(f"k{n}")) for n in range(500)
    ]
    for request in requests:
        scheduler.ensure(request, 0)
    step(scheduler)
    looked, link.polls, link.sent = 0, 0, []
    assert not any(scheduler.ensure(request, 0) for request in requests)
    step(scheduler)
    assert (looked, link.polls, link.sent) == (0, 1, [])


def test_a_step_with_nothing_to_run_listens_for_the_next_answer() -> None:
    """An item that arrives during an idle step is held before the next pass."""
    link = ScriptedLink()
    link.answer = lambda message: [ready("a")] if isinstance(message, Fetch) else []
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a")], announcement("a"))
    scheduler.ensure(request, 0)
    step(scheduler, tokens=0)
    assert scheduler.ensure(request, 0)
    assert link.polls == 3


# ── producer ─────────────────────────────────────────────────────────────────


def encode(scheduler: SchedulerSide, request: Req) -> StepMetadata:
    assert scheduler.ensure(request, 0)
    for index in range(len(request.mm_features)):
        scheduler.allocated(request, index)
    return step(scheduler)


def test_producer_saves_and_announces() -> None:
    """An encoded item is reserved in one message, saved by the worker, and announced."""
    link = ScriptedLink()
    link.answer = reserve_all
    scheduler = side("producer", link)
    request = Req("r", [Feature("a"), Feature("b")])
    metadata = encode(scheduler, request)
    (reserve,) = link.of(Reserve)
    assert [(item.key, item.nbytes, item.shape) for item in reserve.items] == [
        ("a", NBYTES, [ROWS, WIDTH]),
        ("b", NBYTES, [ROWS, WIDTH]),
    ]
    assert reserve.step == metadata.step == metadata.close_step
    assert sorted(metadata.saves) == ["a", "b"]
    assert metadata.saves["a"].token == "r1"
    entry = (scheduler.finished(request) or {})["a"]
    assert entry == {
        "item_indices": [0],
        "metadata": {"grid": [1]},
        "modality": "image",
        "peer_host": "10.0.0.9",
        "peer_port": 5000,
        "size_bytes": NBYTES,
        "shape": [ROWS, WIDTH],
        "dtype": "bfloat16",
    }


def test_announcements_are_signed_and_tickets_passed_on(tmp_path: Path) -> None:
    """With a ticket key a producer signs what it announces; a consumer's agent gets the ticket."""
    path = tmp_path / "ticket_key"
    path.write_text("5e" * 32)
    path.chmod(0o600)
    link = ScriptedLink()
    link.answer = reserve_all
    scheduler = side("producer", link, Settings(ticket_key=str(path)))
    request = Req("r", [Feature("a")])
    encode(scheduler, request)
    announced = scheduler.finished(request) or {}
    facts = ("a", "10.0.0.9", 5000, NBYTES, "bfloat16", [ROWS, WIDTH])
    assert announced["a"]["ticket"] == Tickets([b"\x5e" * 32]).sign(*facts)

    asks = ScriptedLink()
    consumer = side("consumer", asks)
    assert not consumer.ensure(Req("r", [Feature("a")], announced), 0)
    step(consumer, tokens=0)
    assert asks.of(Fetch)[0].items[0].ticket == announced["a"]["ticket"]


def test_metadata_travels_to_other_processes() -> None:
    """A step's orders and a report survive pickling."""
    link = ScriptedLink()
    link.answer = reserve_all
    metadata = encode(side("producer", link), Req("r", [Feature("a")]))
    assert pickle.loads(pickle.dumps(metadata)) == metadata
    report = WorkerReport({"a": "x"}, resets=1)
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_slow_agent_costs_a_moment_and_the_announcement() -> None:
    """The step waits for a bounded time; the item goes out without an address."""
    link = ScriptedLink()
    scheduler = side("producer", link)
    before = link.now
    request = Req("r", [Feature("a")])
    metadata = encode(scheduler, request)
    assert link.now - before <= RESERVE_PATIENCE + 1e-9
    assert not metadata.saves
    assert metadata.close_step == metadata.step
    entry = (scheduler.finished(request) or {})["a"]
    assert entry == {"item_indices": [0], "metadata": {}, "modality": "image"}
    assert counted(scheduler)["reasons"]["unsaved_items"] == {"agent_slow": 1}


def test_while_the_agent_owes_an_answer_nothing_is_asked_or_waited_for() -> None:
    """An agent that is behind is not asked again, and its late answer saves nothing."""
    link = ScriptedLink()
    scheduler = side("producer", link)
    encode(scheduler, Req("r1", [Feature("a")]))
    before = link.now
    encode(scheduler, Req("r2", [Feature("b")]))
    assert link.now == before
    assert len(link.of(Reserve)) == 1
    link.inbox.append(Reserved(1, [ReservedItem("a", 7, [(1, 1)])]))
    link.answer = reserve_all
    metadata = encode(scheduler, Req("r3", [Feature("c")]))
    assert list(metadata.saves) == ["c"]


def test_while_the_agent_is_down_a_producer_encodes_and_announces_nothing() -> None:
    """Requests go on without an address."""
    link = ScriptedLink()
    link.answer = reserve_all
    scheduler = side("producer", link)
    link.up, link.inbox = False, [LinkDown("killed")]
    request = Req("r", [Feature("a")])
    metadata = encode(scheduler, request)
    assert not metadata.saves
    assert "peer_host" not in (scheduler.finished(request) or {})["a"]
    assert counted(scheduler)["reasons"]["unsaved_items"] == {"agent_down": 1}


def test_an_item_without_room_is_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    """The request is served; a counter and one line say why the item is not announced."""
    link = ScriptedLink()
    link.answer = lambda message: (
        [Reserved(message.seq, [ReservedItem(i.key, refused="too large") for i in message.items])]
        if isinstance(message, Reserve)
        else []
    )
    scheduler = side("producer", link)
    with caplog.at_level(logging.WARNING, "vllm.ec_connector"):
        for number in range(3):
            request = Req(f"r{number}", [Feature(f"k{number}")])
            encode(scheduler, request)
            assert "peer_host" not in (scheduler.finished(request) or {})[f"k{number}"]
    assert counted(scheduler)["reasons"]["unsaved_items"] == {"no_room": 3}
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1


def test_an_item_of_the_encoder_cache_is_announced_after_the_agent_confirms_it() -> None:
    """A second request for a cached picture encodes nothing and is announced all the same."""
    link = ScriptedLink()
    link.answer = reserve_all
    scheduler = side("producer", link)
    encode(scheduler, Req("r1", [Feature("a")]))
    link.answer = lambda message: (
        [Reserved(message.seq, [ReservedItem("a", 7, held=True)])]
        if isinstance(message, Reserve)
        else []
    )
    again = Req("r2", [Feature("a")])
    scheduler.ensure(again, 0)
    metadata = step(scheduler)
    assert not metadata.saves
    assert not metadata.republish
    assert "peer_host" in (scheduler.finished(again) or {})["a"]


def test_an_item_that_the_pool_lost_is_published_again() -> None:
    """The worker is told to copy what it still has, without an encode."""
    link = ScriptedLink()
    link.answer = reserve_all
    scheduler = side("producer", link)
    encode(scheduler, Req("r1", [Feature("a")]))
    scheduler.ensure(Req("r2", [Feature("a")]), 0)
    metadata = step(scheduler)
    assert list(metadata.republish) == ["a"]
    assert metadata.close_step == metadata.step


def test_the_same_picture_twice_is_one_entry() -> None:
    """Both places of a repeated item stand in one entry."""
    link = ScriptedLink()
    link.answer = reserve_all
    scheduler = side("producer", link)
    request = Req("r", [Feature("a"), Feature("a", mm_position=Position(9))])
    scheduler.ensure(request, 0)
    scheduler.allocated(request, 0)
    step(scheduler)
    entries = scheduler.finished(request) or {}
    assert entries["a"]["item_indices"] == [0, 1]
    assert entries["a"]["peer_port"] == 5000


def test_text_only_announces_nothing() -> None:
    """A request without media gets no parameters."""
    assert side("producer", ScriptedLink()).finished(Req("r", [])) is None


# ── both ─────────────────────────────────────────────────────────────────────


def test_both_reuses_its_own_saves() -> None:
    """An item saved by this engine is taken from its pool and announced, not encoded again."""
    link = ScriptedLink()
    link.answer = reserve_all
    scheduler = side("both", link)
    encode(scheduler, Req("r1", [Feature("a")]))
    again = Req("r2", [Feature("a")])
    assert not scheduler.ensure(again, 0)
    step(scheduler, tokens=0)
    link.inbox.append(ready("a", "pool"))
    assert scheduler.ensure(again, 0)
    assert scheduler.has_item("a")
    scheduler.allocated(again, 0)
    metadata = step(scheduler)
    assert list(metadata.loads) == ["a"]
    assert not metadata.saves
    assert (scheduler.finished(again) or {})["a"]["peer_port"] == 5000


def test_both_reserves_nothing_in_a_step_that_reaches_no_worker() -> None:
    """What a lost step reserved could never be saved, and whoever waits for it would wait."""
    link = ScriptedLink()
    link.answer = reserve_all
    scheduler = side("both", link)
    request = Req("r", [Feature("a")])
    scheduler.ensure(request, 0)
    scheduler.allocated(request, 0)
    assert not step(scheduler, tokens=0).saves
    assert not link.of(Reserve)
    assert list(step(scheduler).saves) == ["a"]


def test_a_reset_forgets_offers_and_held_items() -> None:
    """After new weights nothing old is announced or loaded."""
    link = ScriptedLink()
    link.answer = reserve_all
    scheduler = side("both", link)
    request = Req("r", [Feature("a")])
    encode(scheduler, request)
    scheduler.worker_report(WorkerReport(resets=1))
    assert "peer_host" not in (scheduler.finished(request) or {})["a"]


def test_an_emptied_cache_is_known_before_the_first_load() -> None:
    """What is in the pool is of other weights: dropped there before anything is asked again."""
    link = ScriptedLink()
    scheduler = side("consumer", link)
    request = Req("r", [Feature("a")], announcement("a"))
    scheduler.ensure(request, 0)
    step(scheduler, tokens=0)
    link.inbox.append(ready("a"))
    assert scheduler.ensure(request, 0)
    assert step(scheduler).resets == 0
    scheduler.take_unavailable()
    scheduler.take_unavailable()
    scheduler.emptied()
    assert not scheduler.ensure(request, 0)
    assert not scheduler.has_item("a")
    assert step(scheduler, tokens=0).resets == 1
    kinds = [type(message) for message in link.sent if isinstance(message, Fetch | DropAll)]
    assert kinds == [Fetch, DropAll, Fetch]


def test_the_workers_word_on_a_known_reset_is_no_news() -> None:
    """The pool is dropped once for each time that the cache was emptied."""
    link = ScriptedLink()
    scheduler = side("both", link)
    scheduler.emptied()
    scheduler.worker_report(WorkerReport(resets=1))
    assert len(link.of(DropAll)) == 1
    scheduler.worker_report(WorkerReport(resets=2))
    scheduler.worker_report(WorkerReport(resets=2))
    assert len(link.of(DropAll)) == 2
    assert step(scheduler).resets == 2


def test_new_weights_are_told_to_this_agent_and_the_next() -> None:
    """The one that serves drops all; one that was just being started hears it when it is up."""
    link = ScriptedLink()
    scheduler = side("both", link)
    changed = Identity("hash", {"weights_version": "version 7"})
    scheduler.reweighed(changed)
    assert link.of(DropAll) == [DropAll(changed.factors)]
    assert link.identity == changed
    assert step(scheduler).resets == 1
    link.inbox.append(LinkUp(welcome("r2")))
    step(scheduler)
    assert link.of(DropAll) == [DropAll(changed.factors)] * 2


def test_gauges_come_from_the_agent() -> None:
    """Usage is asked for now and then while stepping, and exported as it was answered."""
    link = ScriptedLink()
    link.answer = lambda message: (
        [] if isinstance(message, StepDone | Release | Fetch | Reserve) else [stats]
    )
    stats = Stats({"blocks": 10, "blocks_free": 4, "blocks_pinned": 2, "save_failed": 3})
    scheduler = side("producer", link)
    step(scheduler)
    step(scheduler)
    found = counted(scheduler)
    assert found["gauges"]["usage_ratio"] == 0.6
    assert found["gauges"]["pinned_blocks"] == 2
    assert found["counts"]["save_failed_items"] == 3
    assert scheduler.stats() is None
    assert len(link.sent) == 1


def test_closing_ends_the_agent_once() -> None:
    """Shutdown may be called twice."""
    link = ScriptedLink()
    scheduler = side("producer", link)
    scheduler.close()
    scheduler.close()
    assert not link.up
