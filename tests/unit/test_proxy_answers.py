# SPDX-License-Identifier: Apache-2.0
"""What the router reads and changes in answers and bodies, without any socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_connector.proxy import clean, payload
from ec_connector.proxy.clean import EventCleaner, clean_json
from ec_connector.proxy.events import FirstEvent
from ec_connector.proxy.payload import Payload, parse

PARAMS = {"h": {"peer_host": "10.0.0.1", "peer_port": 1}}


def written(body: Payload) -> bytes:
    async def joined() -> bytes:
        return b"".join([piece async for piece in body.pieces()])

    return asyncio.run(joined())


def test_answers_without_parameters_are_not_touched() -> None:
    """Odd spacing, a null, and a model that writes the name stay byte for byte."""
    said = json.dumps({"content": json.dumps({"ec_transfer_params": PARAMS})})
    for text in ('{"a" :1.0}', '{"ec_transfer_params" :  null}', said):
        assert clean_json(text.encode()) == text.encode()


def test_parameters_are_taken_out_at_any_depth() -> None:
    """At the top and within what an event carries."""
    raw = json.dumps({"ec_transfer_params": PARAMS, "response": {"kv_transfer_params": {}, "a": 1}})
    assert json.loads(clean_json(raw.encode())) == {"response": {"a": 1}}


@pytest.mark.parametrize(
    "raw", [b'{"ec_transfer_params": {"a"', b"[" * 100_000 + b'"ec_transfer_params": 1']
)
def test_what_cannot_be_cleaned_does_not_pass(raw: bytes) -> None:
    """Rather no answer than an address."""
    with pytest.raises(ValueError, match=r".+"):
        clean_json(raw)
    with pytest.raises(ValueError, match=r".+"):
        EventCleaner().feed(b"data: " + raw + b"\n")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_events_are_cleaned_however_they_are_cut(cuts: list[int]) -> None:
    """Any cutting gives the same bytes; only the line with parameters is changed."""
    stream = (
        b': hello\r\n\r\ndata: {"a": 1}\n\nevent: x\ndata: {"ec_transfer_params": {"h": 1}, "b": 2}'
        b"\r\n\r\ndata: [DONE]\n\nlast"
    )
    expected = b': hello\r\n\r\ndata: {"a": 1}\n\nevent: x\ndata: {"b": 2}'
    expected += b"\r\n\r\ndata: [DONE]\n\nlast"
    cleaner, got, start = EventCleaner(), b"", 0
    for cut in cuts:
        got += cleaner.feed(stream[start : start + cut])
        start += cut
    assert got + cleaner.feed(stream[start:]) + cleaner.end() == expected


def test_a_line_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded whatever a server sends."""
    monkeypatch.setattr(clean, "MAX_EVENT", 100)
    cleaner = EventCleaner()
    cleaner.feed(b"x" * 60)
    with pytest.raises(ValueError, match="exceeds"):
        cleaner.feed(b"x" * 60)


@pytest.mark.parametrize(
    ("event", "status"),
    [
        ({"choices": []}, 0),
        ({"error": None, "choices": []}, 0),
        ({"error": {"message": "m", "code": 500}}, 500),
        ({"error": {"message": "m", "code": "x"}}, 500),
        ({"error": {"code": 404}}, 404),
        ({"type": "error", "code": 503}, 503),
        ({"type": "response.failed", "response": {}}, 500),
        (["odd"], 0),
    ],
)
def test_first_event_tells_an_error(event: Any, status: int) -> None:
    """After comments and events that come before the engine has done anything."""
    first = FirstEvent()
    first.feed(b': hi\n\nevent: x\ndata: {"type": "response.created"}\n\n')
    assert not first.known
    first.feed(b"data: " + json.dumps(event).encode() + b"\n")
    assert (first.known, first.error) == (True, status)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(json_values, st.text(alphabet='abcé"\\\n', max_size=30))
def test_payload_is_the_values_json(value: Any, text: str) -> None:
    """Long strings are kept by reference, and the text is still that of the whole value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "_LONG", 3)
        patch.setattr(payload, "_PIECE", 5)
        body = Payload.of([value, {"long": text}, text])
        raw = written(body)
    assert json.loads(raw) == [value, {"long": text}, text]
    assert body.size == len(raw)


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": "\\ud800"}', '{"a": 123456789012345678901234567890}']
)
def test_all_that_servers_read_is_read(text: str) -> None:
    """What strict readers refuse passes here, and is written as it was."""
    value = parse(text.encode())
    assert written(Payload.of(value)) == text.encode()
