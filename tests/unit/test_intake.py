# SPDX-License-Identifier: Apache-2.0
"""The consumer side's bookkeeping: every wait ends, and nothing is held or lost for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ec_connector.engine.claims import Source, Want
from ec_connector.engine.intake import ANSWER_GRACE, Intake
from ec_connector.protocol.local import Failed, Ready

ROWS, WIDTH = 4, 8
NBYTES = ROWS * WIDTH * 2
TIMEOUT = 10.0
TOKEN = "r1"


def intake() -> Intake:
    return Intake("bfloat16", TIMEOUT, lambda _modality, width: "" if width == WIDTH else "width")


def want(key: str = "a", *, media: bool = True, port: int = 1, rows: int = ROWS) -> Want:
    source = Source("h", port, rows * WIDTH * 2, (rows, WIDTH)) if port else None
    return Want(key, rows, "image", media, source)


def ready(key: str = "a", **other: object) -> Ready:
    answer = Ready(key, 7, [(3, 1)], NBYTES, "bfloat16", [ROWS, WIDTH], "zmq", "h:1", 100)
    for name, value in other.items():
        setattr(answer, name, value)
    return answer


def holding(table: Intake, request: str = "r", key: str = "a") -> None:
    table.want(table.claim(request), want(key), 0.0)
    table.fetches.clear()
    assert table.ready(ready(key), TOKEN, 1.0) is not None


def test_an_announced_item_is_fetched_once_for_all_who_want_it() -> None:
    """Two requests with one item lead to one fetch, and both hold the item."""
    table = intake()
    one, two = table.claim("one"), table.claim("two")
    table.want(one, want(), 0.0)
    table.want(two, want(), 0.5)
    assert list(table.fetches) == ["a"]
    assert (table.fetches["a"].peer_port, table.fetches["a"].timeout_ms) == (1, 10_000)
    assert one.waiting == two.waiting == {"a"}
    assert table.ready(ready(), TOKEN, 2.0) == 2.0
    assert one.held == two.held == {"a"}
    assert not one.waiting
    assert table.waiting == 0


def test_the_same_item_twice_in_a_request_is_one_wish() -> None:
    """A request that shows one picture twice waits for it once and releases it once."""
    table = intake()
    claim = table.claim("r")
    table.want(claim, want(), 0.0)
    table.want(claim, want(), 0.0)
    table.ready(ready(), TOKEN, 1.0)
    table.finish("r")
    assert table.releases == ["a"]


def test_failure_with_media_is_encoded_here_and_without_it_fails_the_request() -> None:
    """One failed fetch ends as local encoding for one request and as failure for another."""
    table = intake()
    rich, poor = table.claim("rich"), table.claim("poor")
    table.want(rich, want(), 0.0)
    table.want(poor, want(media=False), 0.0)
    table.failed(Failed("a", "missing", "gone", peer="h:1"), 1.0)
    assert rich.local == {"a"}
    assert not rich.failed
    assert poor.failed
    assert table.unavailable == {"poor"}
    assert [(o.request_id, o.reason, o.peer, o.local, o.expected) for o in table.outcomes] == [
        ("rich", "missing", "h:1", True, False),
        ("poor", "missing", "h:1", False, False),
    ]


def test_an_incompatible_factor_is_named() -> None:
    """What a peer refused for is in the words."""
    table = intake()
    table.want(table.claim("r"), want(), 0.0)
    table.failed(Failed("a", "incompatible", "they differ", "weights", "h:1"), 1.0)
    assert "weights" in table.outcomes[0].message


def test_unannounced_media_is_no_fallback() -> None:
    """An item that nobody announced is encoded without being asked for or counted as fallback."""
    table = intake()
    claim = table.claim("r")
    table.want(claim, replace(want(port=0), ask=False), 0.0)
    assert not table.fetches
    assert claim.local == {"a"}
    assert table.outcomes[0].expected


def test_metadata_only_without_announcement_asks_the_pool_then_fails() -> None:
    """Without media and announcement only this pool is asked; a miss ends the request."""
    table = intake()
    claim = table.claim("r")
    table.want(claim, want(media=False, port=0), 0.0)
    assert table.fetches["a"].peer_host == ""
    table.failed(Failed("a", "missing", "not here"), 0.1)
    assert claim.failed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [ROWS + 1, WIDTH]}, "rows are expected"),
        ({"shape": [ROWS * WIDTH]}, "rows are expected"),
        ({"dtype": "float16"}, "float16"),
        ({"nbytes": NBYTES + 2}, "bytes cannot be"),
        ({"shape": [ROWS, WIDTH + 1], "nbytes": ROWS * (WIDTH + 1) * 2}, "width"),
    ],
)
def test_what_arrives_wrong_is_never_admitted(change: dict[str, object], words: str) -> None:
    """Rows, width, dtype and size are compared with what the request expects."""
    table = intake()
    claim = table.claim("r")
    table.want(claim, want(), 0.0)
    assert table.ready(ready(**change), TOKEN, 1.0) is None
    assert claim.local == {"a"}
    assert not claim.held
    assert words in table.outcomes[0].message
    assert table.outcomes[0].reason == "mismatch"
    assert table.releases == ["a"]


def test_one_identifier_with_two_sizes_never_shares_rows() -> None:
    """A request that expects other rows than the pool's item encodes its own."""
    table = intake()
    holding(table)
    other = table.claim("other")
    table.want(other, want(rows=ROWS + 1), 1.0)
    assert not other.held
    assert other.local == {"a"}


def test_one_request_with_two_sizes_of_an_identifier_fails() -> None:
    """Media does not help there: only one of both could be right in the encoder cache."""
    table = intake()
    claim = table.claim("r")
    table.want(claim, want(), 0.0)
    table.want(claim, want(rows=ROWS + 1), 0.0)
    assert claim.failed


def test_an_unusable_announcement_is_a_counted_fallback() -> None:
    """A fault found before asking counts by its reason and asks nobody."""
    table = intake()
    claim = table.claim("r")
    table.want(claim, replace(want(port=0), fault="mismatch", fault_text="49 rows"), 0.0)
    assert not table.fetches
    assert (table.outcomes[0].reason, table.outcomes[0].expected) == ("mismatch", False)


def test_a_silent_agent_cannot_make_a_request_wait_for_ever() -> None:
    """Shortly after the deadline an unanswered item is given up on our own clock."""
    table = intake()
    claim = table.claim("r")
    table.want(claim, want(), 0.0)
    table.expire(TIMEOUT + ANSWER_GRACE - 0.01)
    assert claim.waiting == {"a"}
    table.expire(TIMEOUT + ANSWER_GRACE)
    assert claim.local == {"a"}
    assert table.outcomes[0].reason == "agent_unresponsive"
    assert "a" in table.releases


def test_a_late_joiner_keeps_its_own_deadline() -> None:
    """When the first one's time is up, whoever came later asks again for its own rest."""
    table = intake()
    first, late = table.claim("first"), table.claim("late")
    table.want(first, want(), 0.0)
    table.want(late, want(), 6.0)
    table.fetches.clear()
    table.failed(Failed("a", "deadline", "late"), TIMEOUT)
    assert first.local == {"a"}
    assert late.waiting == {"a"}
    assert table.fetches["a"].timeout_ms == 6000
    table.failed(Failed("a", "deadline", "late"), TIMEOUT + 6)
    assert late.local == {"a"}


def test_another_announcement_is_tried_when_the_first_peer_fails() -> None:
    """A request that names another producer is not failed by the first one."""
    table = intake()
    first, other = table.claim("first"), table.claim("other")
    table.want(first, want(media=False), 0.0)
    table.want(other, want(media=False, port=2), 0.0)
    table.fetches.clear()
    table.failed(Failed("a", "peer_unreachable", "gone"), 1.0)
    assert first.failed
    assert not other.failed
    assert table.fetches["a"].peer_port == 2


def test_aborts_leave_nothing_behind() -> None:
    """100 requests that end while waiting release what was asked and empty the tables."""
    table = intake()
    for number in range(100):
        table.want(table.claim(f"r{number}"), want(f"k{number}"), 0.0)
    table.fetches.clear()  # sent
    for number in range(100):
        table.finish(f"r{number}")
    assert sorted(table.releases) == sorted(f"k{number}" for number in range(100))
    assert not table.claims
    assert table.waiting == 0
    assert not table._items


def test_a_wish_that_was_never_sent_needs_no_release() -> None:
    """A request that ends in the step in which it came takes its fetch back."""
    table = intake()
    table.want(table.claim("r"), want(), 0.0)
    table.finish("r")
    assert not table.fetches
    assert not table.releases


def test_an_answer_after_the_end_is_ignored() -> None:
    """A late answer pins nothing and reports nothing."""
    table = intake()
    table.want(table.claim("r"), want(), 0.0)
    table.finish("r")
    assert table.ready(ready(), TOKEN, 1.0) is None
    table.failed(Failed("a", "missing", "gone"), 1.0)
    assert not table.outcomes


def test_the_pin_outlives_the_step_that_loads() -> None:
    """A finished request's item is released only when no worker can still be copying it."""
    table = intake()
    holding(table)
    assert table.load(table.claims["r"], "a") is not None
    assert list(table.take_loads(5, [], delivered=True)) == ["a"]
    table.step_returned(4)
    table.finish("r")
    assert table.releases == []
    table.step_returned(5)
    assert table.releases == ["a"]
    assert not table._items


def test_what_was_loaded_is_told_when_the_step_returns() -> None:
    """While its request still holds it, once for each load, and not for loads kept for later."""
    table = intake()
    holding(table)
    claim = table.claims["r"]
    table.load(claim, "a")
    table.take_loads(4, [], delivered=False)
    table.step_returned(4)
    assert table.loaded == []
    table.take_loads(5, [], delivered=True)
    table.step_returned(4)
    assert table.loaded == []
    for step in (5, 6):
        table.step_returned(step)
        assert (table.loaded, table.releases) == (["a"], [])


def test_a_lingering_item_is_taken_up_again() -> None:
    """An item about to be released serves a new request without another fetch."""
    table = intake()
    holding(table)
    table.load(table.claims["r"], "a")
    table.take_loads(5, [], delivered=True)
    table.finish("r")
    again = table.claim("again")
    table.want(again, want(), 2.0)
    assert again.held == {"a"}
    assert not table.fetches
    table.step_returned(5)
    assert table.releases == []


def test_loads_of_a_step_that_reaches_no_worker_are_kept() -> None:
    """Until a step is delivered its loads are ordered again, and the pin stays."""
    table = intake()
    holding(table)
    table.load(table.claims["r"], "a")
    assert list(table.take_loads(1, [], delivered=False)) == ["a"]
    table.finish("r")
    table.step_returned(1)
    assert table.releases == []
    assert list(table.take_loads(2, [], delivered=True)) == ["a"]
    assert not table.take_loads(3, [], delivered=True)
    table.step_returned(2)
    assert table.releases == ["a"]


def test_a_kept_load_is_dropped_when_its_room_is_freed() -> None:
    """What left the encoder cache before it was loaded is not loaded into it any more."""
    table = intake()
    holding(table)
    table.load(table.claims["r"], "a")
    table.take_loads(1, [], delivered=False)
    assert not table.take_loads(2, ["a"], delivered=True)
    table.finish("r")
    assert table.releases == ["a"]


def test_a_preempted_request_can_load_again() -> None:
    """What was loaded once is still held, so a second load needs no second fetch."""
    table = intake()
    holding(table)
    claim = table.claims["r"]
    for step in (1, 2):
        assert table.load(claim, "a") is not None
        assert list(table.take_loads(step, [], delivered=True)) == ["a"]


def test_agent_down_ends_waits_and_keeps_what_is_mapped() -> None:
    """Waiting items end at once; held ones stay if the workers have their memory mapped."""
    table = intake()
    holding(table, "mapped", "m")
    table.want(table.claim("unmapped"), want("u"), 0.0)
    table.ready(ready("u"), "r0", 1.0)
    table.want(table.claim("waiting"), want("w"), 0.0)
    table.agent_down("killed", {TOKEN}, 2.0)
    assert table.claims["mapped"].held == {"m"}
    assert table.claims["unmapped"].local == {"u"}
    assert table.claims["waiting"].local == {"w"}
    assert {outcome.reason for outcome in table.outcomes} == {"agent_down"}


def test_while_the_agent_is_down_nothing_is_asked() -> None:
    """New wishes end at once with the reason, and are asked again when it is back."""
    table = intake()
    table.agent_down("killed", set(), 0.0)
    table.want(table.claim("one"), want("a", media=False), 0.0)
    assert table.claims["one"].failed
    table.agent_up()
    table.want(table.claim("two"), want("b"), 0.0)
    assert list(table.fetches) == ["b"]


def test_after_a_reset_held_items_are_asked_for_again() -> None:
    """Rows of the old weights are given up, and the request looks at its items anew."""
    table = intake()
    holding(table)
    claim = table.claims["r"]
    claim.covered = 0
    table.forget()
    assert table.releases == ["a"]
    assert not claim.held
    assert claim.covered > 0
    table.want(claim, want(), 3.0)
    assert list(table.fetches) == ["a"]


def test_a_load_that_failed_fails_its_requests_and_is_mended_for_later_ones() -> None:
    """Zeros in the encoder cache are never used: holders fail, the next request reloads."""
    table = intake()
    holding(table)
    table.lost("a", "no memory")
    assert table.unavailable == {"r"}
    table.finish("r")
    later = table.claim("later")
    table.want(later, want(), 2.0)
    table.ready(ready(), TOKEN, 3.0)
    table.mend(later)
    assert list(table.take_loads(9, [], delivered=True)) == ["a"]
    table.mend(later)
    assert not table.take_loads(10, [], delivered=True)


def test_zeros_are_not_hidden_by_media() -> None:
    """vLLM would take the zeros for a hit and not encode, so without a reload the request fails."""
    table = intake()
    table.lost("a", "no memory")
    claim = table.claim("r")
    table.want(claim, replace(want(port=0), ask=False), 0.0)
    table.failed(Failed("a", "missing", "gone"), 1.0)
    assert claim.failed


def test_freed_zeros_are_forgotten() -> None:
    """Once the zeros left the encoder cache, the media can be encoded again."""
    table = intake()
    table.lost("a", "no memory")
    table.take_loads(1, ["a"], delivered=True)
    claim = table.claim("r")
    table.want(claim, replace(want(port=0), ask=False), 0.0)
    assert claim.local == {"a"}
