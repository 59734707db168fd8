# SPDX-License-Identifier: Apache-2.0
"""What the router changes in a chat request."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_connector.proxy.rewrite import (
    count_announced,
    decode_body,
    encode_body,
    media_parts,
    metadata_only,
    reply_params,
)

GRID = {"image_grid_thw": [1, 4, 4]}


def body_of(*parts: Any, **options: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **options}


def item(*indices: int, modality: str | None = "image", **changes: Any) -> dict[str, Any]:
    named = {} if modality is None else {"modality": modality}
    address = {"peer_host": "127.0.0.1", "peer_port": 14579}
    return {"item_indices": list(indices), "metadata": GRID, **named, **address, **changes}


IMAGE = {"type": "image_url", "image_url": {"url": "data:a"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "b", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "data:c"}}
TEXT = {"type": "text", "text": "look"}


def test_media_is_found_in_every_message_and_form() -> None:
    """With a type, by key alone, with a uuid, in a tool's message; nothing else is media."""
    body = {
        "messages": [
            {"role": "system", "content": "image_url"},
            {"role": "user", "content": [TEXT, IMAGE, {"image_url": "http://x"}, AUDIO]},
            {"role": "assistant", "content": None},
            {"role": "tool", "content": [VIDEO, {"uuid": "u", "image_url": None}]},
            {"role": "user", "content": [{"type": "image_embeds", "image_embeds": GRID}]},
        ]
    }
    assert media_parts(body) == [
        (1, 1, "image"),
        (1, 2, "image"),
        (1, 3, "audio"),
        (3, 0, "video"),
        (3, 1, "image"),
    ]


@pytest.mark.parametrize(
    "messages",
    [None, 5, "text", {}, [], [None, 5, "x"], [{}], [{"content": 5}], [{"content": [None, 5]}],
     [{"content": [{"type": ["image_url"]}]}]],
)  # fmt: skip
def test_odd_messages_hold_no_media(messages: object) -> None:
    """Whatever JSON a client sends, looking for media does not fail."""
    assert media_parts({"messages": messages}) == []
    assert media_parts({}) == []


def test_encode_body_drops_what_shapes_the_answer() -> None:
    """Options that vLLM refuses with one token, or that cost the encoder work, are gone."""
    answer_options = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 99,
        "max_completion_tokens": 99,
        "min_tokens": 5,
        "n": 4,
        "logprobs": True,
        "top_logprobs": 3,
        "tools": [{}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "ec_transfer_params": {"h": item(0)},
        "kv_transfer_params": {},
    }
    kept = {"mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"image": {}}, "seed": 3}
    body = body_of(IMAGE, **answer_options, **kept)
    before = copy.deepcopy(body)
    assert encode_body(body) == body_of(IMAGE, stream=False, max_tokens=1, **kept)
    assert body == before


def test_decode_body_replaces_the_clients_params() -> None:
    """The encoder's announcement or none, never what the client sent."""
    body = body_of(IMAGE, ec_transfer_params={"evil": item(0)})
    assert decode_body(body, {"h": item(0)}) == body_of(IMAGE, ec_transfer_params={"h": item(0)})
    assert decode_body(body, {}) == decode_body(body, None) == body_of(IMAGE)
    assert "evil" in body["ec_transfer_params"]


def test_reply_params() -> None:
    """The announcement, nothing, or an error that says what the reply is not."""
    assert reply_params({"choices": [], "ec_transfer_params": {"h": {}}}) == {"h": {}}
    assert reply_params({"choices": []}) == {}
    assert reply_params({"choices": [], "ec_transfer_params": None}) == {}
    for reply in (None, [], {}, {"choices": 1}, {"choices": [], "ec_transfer_params": [1]}):
        with pytest.raises(ValueError, match=r"chat completion|not an object"):
            reply_params(reply)


def test_count_announced_counts_places_with_an_address() -> None:
    """An item twice in a request counts twice, one without an address not at all."""
    params = {
        "a": item(0, 2),
        "b": item(1),
        "no-port": item(3, peer_port=0),
        "none": {"item_indices": [4], "metadata": {}},
        "odd": 5,
    }
    assert count_announced(params) == 3


def test_modalities_are_matched_one_by_one() -> None:
    """The encoder's order may mix modalities differently; within each it is the parts'."""
    frames = {"video_grid_thw": [2, 4, 4]}
    params = {
        "image-1": item(0),
        "image-2": item(1),
        "video-1": item(2, modality="video", metadata=frames),
    }
    body, replaced = metadata_only(body_of(IMAGE, VIDEO, TEXT, IMAGE), params)
    assert replaced == 3
    assert body["messages"][0]["content"] == [
        {"type": "image_embeds", "image_embeds": GRID, "uuid": "image-1"},
        {"type": "video_embeds", "video_embeds": frames, "uuid": "video-1"},
        TEXT,
        {"type": "image_embeds", "image_embeds": GRID, "uuid": "image-2"},
    ]


def test_a_modality_without_metadata_keeps_its_media() -> None:
    """Images are replaced though the audio beside them cannot be."""
    params = {"i": item(0), "a": item(1, modality="audio", metadata={})}
    body, replaced = metadata_only(body_of(IMAGE, AUDIO), params)
    assert replaced == 1
    assert body["messages"][0]["content"][1] == AUDIO


def test_entries_without_a_modality_belong_to_the_only_one() -> None:
    """Announcements of vLLM before 0.33 say no modality; with one there is no doubt."""
    assert metadata_only(body_of(IMAGE), {"i": item(0, modality=None)})[1] == 1
    assert metadata_only(body_of(IMAGE, AUDIO), {"i": item(0, modality=None)})[1] == 0


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"a": item(0)},  # one entry for two parts
        {"a": item(0, 1, 2)},
        {"a": item(0), "b": item(0)},
        {"a": item(0), "b": item(2)},
        {"a": item(-1), "b": item(0)},
        {"a": item(0), "b": item(1, modality="video")},
        {"a": item(0), "b": item(1, modality=["image"])},
        {"a": item(0), "b": item(1, peer_host="")},
        {"a": item(0), "b": item(1, metadata={})},
        {"a": item(0), "b": item(1, metadata={"grid": [[1]]})},
        {"a": item(0), "b": item(1, metadata={"grid": [True]})},
        {"a": item(0), "b": item(1, metadata="grid")},
        {"a": item(0), "b": item("1")},  # type: ignore[arg-type]
        {"a": item(0), "b": 5},
    ],
)
def test_media_stays_unless_every_item_is_sure(params: dict[str, Any]) -> None:
    """Entries that do not fit the two images one to one replace nothing."""
    body = body_of(IMAGE, IMAGE)
    assert metadata_only(body, params) == (body, 0)


@pytest.mark.parametrize("option", ["mm_processor_kwargs", "media_io_kwargs"])
def test_media_stays_when_options_enter_the_hash(option: str) -> None:
    """The decoder would hash the identifier again and look for another item."""
    body = body_of(IMAGE, **{option: {"x": 1}})
    assert metadata_only(body, {"i": item(0)}) == (body, 0)
    assert metadata_only(body_of(IMAGE, **{option: {}}), {"i": item(0)})[1] == 1


def test_other_messages_pass_unchanged() -> None:
    """Replacing touches only the parts; the given body is not changed."""
    body = body_of(IMAGE)
    body["messages"][:0] = [{"role": "system", "content": "be brief"}, "odd"]
    before = copy.deepcopy(body)
    changed, replaced = metadata_only(body, {"i": item(0)})
    assert replaced == 1
    assert changed["messages"][:2] == before["messages"][:2]
    assert body == before


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["image", "x", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "item_indices": st.lists(st.integers(-1, 3), max_size=3) | json_values,
        "modality": st.sampled_from(["image", "audio", None]) | json_values,
        "metadata": st.just(GRID) | json_values,
        "peer_host": st.just("h") | json_values,
        "peer_port": st.just(1) | json_values,
    },
)


@pytest.mark.property
@given(
    parts=st.lists(st.sampled_from([IMAGE, AUDIO, TEXT]) | json_values, max_size=4),
    params=st.dictionaries(st.text(max_size=2), entries | json_values, max_size=4),
)
def test_any_announcement_leaves_each_part_whole_or_replaced(
    parts: list[Any], params: dict[str, Any]
) -> None:
    """Whatever an encoder says, every part is the client's or an announced item's."""
    body = body_of(*parts)
    changed, replaced = metadata_only(body, params)
    count_announced(params)
    content = changed["messages"][0]["content"]
    assert len(content) == len(parts)
    differing = [(old, new) for old, new in zip(parts, content, strict=True) if old is not new]
    assert len(differing) == replaced
    for old, new in differing:
        assert old in (IMAGE, AUDIO)
        assert params[new["uuid"]]["peer_host"]
        assert new[new["type"]] == params[new["uuid"]]["metadata"]
