# SPDX-License-Identifier: Apache-2.0
"""Where the router sends things, and which servers it trusts: pure parts, no sockets."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_connector.proxy import media
from ec_connector.proxy.circuit import FAILURES, FIRST_WAIT, LONGEST_WAIT, Circuit, State
from ec_connector.proxy.instances import Instances, Role
from ec_connector.proxy.placement import FREE, SHARE, by_key, least_loaded


def encoders(count: int) -> Instances:
    instances = Instances()
    for number in range(count):
        instances.add(Role.ENCODE, f"http://encoder-{number}")
    return instances


def test_a_server_that_goes_moves_only_its_own_keys() -> None:
    """All others stay where they are, and the keys are spread evenly enough."""
    instances = encoders(5)
    keys = [f"key {number}" for number in range(1000)]
    before = {key: by_key(key, instances.targets(Role.ENCODE)) for key in keys}
    counts = [list(before.values()).count(target) for target in instances.targets(Role.ENCODE)]
    assert min(counts) > 120
    gone = instances.targets(Role.ENCODE)[2]
    instances.remove(Role.ENCODE, gone.instance.url)
    after = {key: by_key(key, instances.targets(Role.ENCODE)) for key in keys}
    assert {key for key in keys if after[key] is not before[key]} == {
        key for key in keys if before[key] is gone
    }


@given(st.integers(1, 8), st.lists(st.sampled_from("abc"), max_size=60))
def test_load_is_bounded_whatever_the_keys(count: int, keys: list[str]) -> None:
    """No server ever has much more than the mean, though all want the same one."""
    targets = encoders(count).targets(Role.ENCODE)
    for taken, key in enumerate(keys, 1):
        target = by_key(key, targets)
        target.load += 1
        assert target.load <= max(FREE, math.ceil(SHARE * taken / count))


def test_least_loaded_takes_turns() -> None:
    """Of those that have the same, the one that had least."""
    targets = encoders(3).targets(Role.ENCODE)
    seen = []
    for _ in range(6):
        target = least_loaded(targets)
        with target.carrying():
            seen.append(target.name)
    assert seen == 2 * [target.name for target in targets]
    assert [target.load for target in targets] == [0, 0, 0]


def test_ranks_are_targets_of_one_server() -> None:
    """A server that fails is passed over with all its ranks; removal is for good."""
    instances = Instances()
    one = instances.add(Role.DECODE, "http://a", ranks=4)
    assert instances.add(Role.DECODE, "http://a", ranks=4) is one
    assert [target.name for target in instances.targets(Role.DECODE)] == [
        f"http://a#{rank}" for rank in range(4)
    ]
    assert instances.targets(Role.ENCODE) == []
    assert instances.targets(Role.DECODE, but=one) == []
    for _ in range(FAILURES):
        one.circuit.failed(0.0)
    assert instances.targets(Role.DECODE) == []
    assert instances.remove(Role.DECODE, "http://a")
    assert not instances.remove(Role.DECODE, "http://a")
    one.circuit.worked()  # a request that it still had
    assert one.circuit.failed(1.0) is one.circuit.checked(True, 1.0) is False
    assert one.circuit.state is State.REMOVED


def test_one_request_at_a_time_on_trial() -> None:
    """A server that has just come back is not flooded."""
    instances = encoders(1)
    (target,) = instances.targets(Role.ENCODE)
    for _ in range(FAILURES):
        target.instance.circuit.failed(0.0)
    assert target.instance.circuit.checked(True, FIRST_WAIT)
    assert instances.targets(Role.ENCODE) == [target]
    with target.carrying():
        assert instances.targets(Role.ENCODE) == []


def test_circuit_waits_longer_each_time_that_a_trial_fails() -> None:
    """Whatever its health check says; once it has served, the wait is short again."""
    circuit, now = Circuit("s"), 0.0
    for _ in range(FAILURES):
        assert circuit.state is State.SERVING
        circuit.failed(now)
    waits = []
    for _ in range(8):
        assert circuit.state is State.OUT
        start = now
        while not circuit.checked(True, now):
            now += 0.5
        waits.append(now - start)
        assert circuit.failed(now)
    assert waits == [min(FIRST_WAIT * 2**n, LONGEST_WAIT) for n in range(8)]
    while not circuit.checked(True, now):
        now += 0.5
    circuit.worked()
    assert circuit.state is State.SERVING
    for _ in range(FAILURES):
        circuit.failed(now)
    assert circuit.checked(True, now + FIRST_WAIT)


def test_health_check_is_believed_if_it_saw_the_failure() -> None:
    """A server that was dead serves at once when it is back; one that seemed well is tried."""
    dead, odd = Circuit("dead"), Circuit("odd")
    for _ in range(FAILURES):
        dead.failed(0.0)
        odd.failed(0.0)
    assert not dead.checked(False, 0.1)
    assert dead.checked(True, 0.2)
    assert dead.state is State.SERVING
    assert not odd.checked(True, 0.2)
    assert odd.checked(True, FIRST_WAIT)
    assert odd.state is State.TRIAL
    assert odd.checked(False, FIRST_WAIT)
    assert odd.checked(True, FIRST_WAIT)
    assert odd.state is State.SERVING
    assert not odd.failed(2.0)  # a row of failures starts anew


def test_single_failures_take_nothing_out() -> None:
    """Only a row of them does, whether of requests or of health checks."""
    circuit = Circuit("s")
    for _ in range(10):
        circuit.failed(0.0)
        circuit.checked(False, 0.0)
        circuit.worked()
    assert circuit.state is State.SERVING


def image(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def body_of(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def first(body: dict[str, Any]) -> Any:
    return body["messages"][0]["content"][0]


def test_uuid_is_of_the_content() -> None:
    """The same bytes have the same, others another; the request given is not changed."""
    one, two = image("data:image/png;base64,AAAA"), image("data:image/png;base64,AAAB")
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    body = body_of(one, two, one, sound)
    before = copy.deepcopy(body)
    parts = media.identified(body)["messages"][0]["content"]
    assert body == before
    uuids = [part["uuid"] for part in parts]
    assert uuids[0] == uuids[2]
    assert len(set(uuids)) == 3
    assert all(uuid.startswith(media.OWN) for uuid in uuids)


@pytest.mark.parametrize(
    "part",
    [
        image("http://a/b.png"),
        image("data:image/png;base64,AAAA", uuid="mine"),
        image(None, uuid="cached"),
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "text", "text": "data:x"},
    ],
)
def test_parts_that_keep_what_they_have(part: Any) -> None:
    """No uuid for what may change, for videos, nor over the client's."""
    body = body_of(part)
    assert media.identified(body) is media.anonymous(body) is body


def test_uuid_that_claims_to_be_the_routers_is_dropped() -> None:
    """It could stand for the content of somebody else."""
    claimed = f"{media.OWN}{'0' * 64}"
    inline = body_of(image("data:image/png;base64,AAAA", uuid=claimed))
    honest = body_of(image("data:image/png;base64,AAAA"))
    assert media.identified(inline) == media.identified(honest)
    assert media.anonymous(inline) == honest
    remote = body_of(image("http://a/b.png", uuid=claimed))
    assert "uuid" not in first(media.identified(remote))


def test_items_without_media_are_not_encoded() -> None:
    """A part that names something a server has already is the decoder's to find."""
    body = body_of(image(None, uuid="u"), image("http://a/b.png"), {"image_url": None, "uuid": "u"})
    assert [item.place for item in media.items(media.CHAT, body)] == [(0, 1)]


@pytest.mark.parametrize("path", [media.CHAT, media.RESPONSES, media.MESSAGES, "/v1/completions"])
@given(
    st.recursive(
        st.none() | st.integers() | st.sampled_from(["image", "input_image", "data:a", "user"]),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "input", "content", "type", "image_url", "url", "source", "data",
                 "uuid", "input_audio", "media_type"]
            ),
            inner,
            max_size=4,
        ),
        max_leaves=20,
    )
)  # fmt: skip
def test_any_json_is_looked_through(path: str, value: Any) -> None:
    """Whatever a client sends, looking for media does not fail."""
    content = [{"content": value}]
    for body in ({"messages": value, "input": value}, {"messages": content, "input": content}):
        media.items(path, body)
        media.identified(body)
        media.anonymous(body)
