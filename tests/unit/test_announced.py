# SPDX-License-Identifier: Apache-2.0
"""What a client may put into ``ec_transfer_params``, identifiers and widths."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ec_connector.engine.announced import BadAnnouncement, read_source
from ec_connector.engine.keys import why_not_shared
from ec_connector.engine.widths import Widths

GOOD: dict[str, Any] = {
    "item_indices": [0],
    "metadata": {},
    "modality": "image",
    "peer_host": "10.0.0.1",
    "peer_port": 5000,
    "size_bytes": 64,
    "shape": [4, 8],
}


def test_an_announcement_is_read() -> None:
    """The in-tree keys alone are enough."""
    source = read_source({"k": GOOD}, "k", 4, "bfloat16")
    assert source is not None
    assert (source.host, source.port, source.nbytes, source.shape) == ("10.0.0.1", 5000, 64, (4, 8))
    assert str(source) == "10.0.0.1:5000"
    assert source.ticket == ""
    signed = read_source({"k": GOOD | {"ticket": "0" * 64}}, "k", 4, "bfloat16")
    assert signed is not None
    assert signed.ticket == "0" * 64


@pytest.mark.parametrize("ticket", [None, 3, ["t"], "0" * 65, "é", "\ud800"])
def test_what_is_no_ticket(ticket: object) -> None:
    """Refused before it is sent anywhere."""
    with pytest.raises(BadAnnouncement, match="ticket"):
        read_source({"k": GOOD | {"ticket": ticket}}, "k", 4, "bfloat16")


@pytest.mark.parametrize(
    "params", [None, [], "x", {}, {"k": None}, {"k": 3}, {"k": {}}, {"other": GOOD}]
)
def test_nothing_announced(params: object) -> None:
    """Missing or shapeless entries are no announcement."""
    assert read_source(params, "k", 4, "bfloat16") is None


@pytest.mark.parametrize(
    "change",
    [
        {"peer_host": 5},
        {"peer_host": "x" * 300},
        {"peer_host": "bro\ud800ken"},
        {"peer_port": 0},
        {"peer_port": 70000},
        {"peer_port": "5000"},
        {"peer_port": True},
        {"size_bytes": 65},
        {"size_bytes": -64},
        {"size_bytes": None},
        {"shape": "48"},
        {"shape": [4, -8]},
        {"shape": [4, 8.0]},
        {"shape": [5, 8], "size_bytes": 80},
        {"shape": [4, 1 << 47], "size_bytes": 64},
        {"shape": [4, 2, 4]},
        {"shape": [1] * 100},
        {"dtype": "float16"},
        {"dtype": ["bfloat16"]},
        {"dtype": json.loads("[" * 900 + "]" * 900)},
    ],
)
def test_a_malformed_announcement_is_refused(change: dict[str, Any]) -> None:
    """Any wrong field is refused with words, never with another exception."""
    with pytest.raises(BadAnnouncement):
        read_source({"k": GOOD | change}, "k", 4, "bfloat16")


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("786060435e545adec237f59e", ""),
        ("my-uuid-1", ""),
        ("../x", ""),
        ("lora:abc", ""),
        ("renderer0-mm-1-image-0", "request_local"),
        ("renderer12-mm-345-vision_chunk-6", "request_local"),
        ("adapter:renderer0-mm-1-image-0", "request_local"),
        ("", "bad_key"),
        ("x" * 513, "bad_key"),
    ],
)
def test_which_identifiers_are_shared(key: str, reason: str) -> None:
    """Content hashes and client ids travel; numbers that a process gave out do not."""
    assert why_not_shared(key) == reason


def test_a_measured_width_is_the_only_one() -> None:
    """Where the encoder was tried, nothing else fits."""
    widths = Widths({"image": 8}, frozenset({16}))
    assert widths.fault("image", 8) == ""
    assert "16" in widths.fault("image", 16)


def test_the_first_possible_width_is_learnt() -> None:
    """Without a measurement the configuration limits the first, and the first limits the rest."""
    widths = Widths({}, frozenset({8, 32}))
    assert widths.fault("image", 9)
    assert widths.fault("image", 32) == ""
    assert widths.fault("image", 8)
    assert widths.fault("video", 8) == ""


def test_an_unlimited_width_is_learnt() -> None:
    """Where nothing is known, rows of one modality still have one width."""
    widths = Widths({}, frozenset())
    assert widths.fault("image", 5) == ""
    assert widths.fault("image", 6)
