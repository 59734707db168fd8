# SPDX-License-Identifier: Apache-2.0
"""Frames of released wire versions, byte for byte. ``tests/golden/make.py`` adds cases."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ec_connector.protocol import messages
from ec_connector.protocol.messages import ToConsumer, ToProducer

FOLDER = Path(__file__).resolve().parents[1] / "golden" / f"v{messages.EC_CONNECTOR_VERSION}"
CASES = sorted(path.stem for path in FOLDER.glob("*.bin"))
TO_PRODUCER: tuple[type[msgspec.Struct], ...] = typing.get_args(ToProducer)
KINDS: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind for kind in (*TO_PRODUCER, *typing.get_args(ToConsumer))
}


def load(name: str) -> tuple[bytes, dict[str, Any], msgspec.Struct]:
    """A case's frame, its description, and the message that the description spells."""
    described = json.loads((FOLDER / f"{name}.json").read_text())
    fields = json.dumps(described["fields"]).encode()
    message = msgspec.json.decode(
        b'{"type":"%b",%b' % (tag(KINDS[described["kind"]]).encode(), fields[1:]),
        type=KINDS[described["kind"]],
    )
    return (FOLDER / f"{name}.bin").read_bytes(), described, message


def tag(kind: type[msgspec.Struct]) -> str:
    """The ``type`` a kind has on the wire."""
    value = kind.__struct_config__.tag
    assert isinstance(value, str)
    return value


def decode(frame: bytes, kind: str) -> ToProducer | ToConsumer:
    """Decoded the way that the side which gets this kind does."""
    if KINDS[kind] in TO_PRODUCER:
        return messages.decode_to_producer(frame)
    return messages.decode_to_consumer(frame)


@pytest.mark.parametrize("name", CASES)
def test_frame_decodes_to_the_same_fields(name: str) -> None:
    """What a released version sent still means what it meant."""
    frame, described, message = load(name)
    assert decode(frame, described["kind"]) == message


@pytest.mark.parametrize("name", CASES)
def test_message_encodes_to_the_same_bytes(name: str) -> None:
    """What is sent today is byte for byte what the released version sent."""
    frame, described, message = load(name)
    if described["encoded_here"]:
        assert messages.encode(message).hex() == frame.hex()  # type: ignore[arg-type]
    else:
        assert messages.encode(message) != frame  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_field_of_every_message_is_in_a_frame(kind: str) -> None:
    """A field or message that is added needs a frame in which it is not left out."""
    seen: set[str] = set()
    for name in CASES:
        frame, described, _ = load(name)
        if described["kind"] == kind and described["encoded_here"]:
            seen |= msgspec.msgpack.decode(frame).keys() - {"type"}
    assert seen == set(KINDS[kind].__struct_fields__)


def test_no_description_without_a_frame() -> None:
    """Both files of each case are there."""
    assert CASES
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == CASES
