# SPDX-License-Identifier: Apache-2.0
"""Our wire beside that of the vLLM that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ec_connector.protocol import fingerprint, messages
from ec_connector.protocol.messages import RegionRef

pytestmark = pytest.mark.contract

in_tree = pytest.importorskip(
    "vllm.distributed.ec_transfer.ec_connector.cpu.protocol",
    reason="needs a vLLM that has the in-tree protocol",
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "v1"
REGION = RegionRef(pid=4242, fd=17, nbytes=1 << 30, block_bytes=1 << 16, token="ab" * 16)
REQUEST = {"mm_hash": "h" * 64, "compatibility_hash": "c" * 64, "session_id": "session"}
ACK: dict[str, Any] = {
    "mm_hash": "h" * 64,
    "session_id": "session",
    "src_block_indices": [0, 5, 70000],
    "agent_metadata": b"\x00agent\xff",
    "mem_descriptor": b"memory",
}
OUR_REQUEST_FIELDS: dict[str, Any] = {
    "xfer_id": 7,
    "fingerprint": {"weights": "9c11"},
    "planes": ["memory", "zmq"],
    "credit_bytes": 1,
    "chunk_bytes": 2,
    "timeout_ms": 3,
    "ticket": "1.0123",
    "codecs": ["zstd"],
}
OUR_ACK_FIELDS: dict[str, Any] = {
    "xfer_id": 7,
    "plane": "memory",
    "nbytes": 64,
    "dtype": "bfloat16",
    "shape": [4, 8],
    "message": "message",
    "factor": "weights",
    "traceback": "traceback",
    "generation": 9,
    "extents": [(0, 1)],
    "region": REGION,
    "codec": "zstd",
    "proof": b"proof",
}


def test_our_additions_are_all_here() -> None:
    """A field that is added to ours gets into these tests."""
    in_tree_request = set(in_tree.XferReq.__struct_fields__)
    in_tree_ack = set(in_tree.XferAck.__struct_fields__)
    assert set(messages.XferReq.__struct_fields__) == in_tree_request | set(OUR_REQUEST_FIELDS)
    assert set(messages.XferAck.__struct_fields__) == in_tree_ack | set(OUR_ACK_FIELDS)


def test_base_fields_are_in_the_same_order() -> None:
    """So that both are constructed alike by position."""
    for name in ("XferReq", "XferAck"):
        theirs = getattr(in_tree, name).__struct_fields__
        assert getattr(messages, name).__struct_fields__[: len(theirs)] == theirs


def test_statuses_agree() -> None:
    """Same names, same numbers."""
    assert {status.name: status.value for status in messages.XferStatus} == {
        status.name: status.value for status in in_tree.XferStatus
    }


@pytest.mark.parametrize("fields", [REQUEST, {**REQUEST, "session_id": ""}])
def test_their_request_decodes_here(fields: dict[str, str]) -> None:
    """Every field arrives; the version, which they leave out, reads as 1."""
    frame = msgspec.msgpack.encode(in_tree.XferReq(**fields))
    assert b"connector_version" not in frame
    read = messages.decode_to_producer(frame)
    assert read == messages.XferReq(**fields, connector_version=1)


def test_their_request_with_another_version_decodes_here() -> None:
    """A version they do write is the one that is read."""
    frame = msgspec.msgpack.encode(in_tree.XferReq(**REQUEST, connector_version=77))
    read = messages.decode_to_producer(frame)
    assert isinstance(read, messages.XferReq)
    assert read.connector_version == 77


@pytest.mark.parametrize("status", list(messages.XferStatus))
def test_their_ack_decodes_here(status: messages.XferStatus) -> None:
    """Every base field of every answer arrives."""
    theirs = in_tree.XferAck(status=in_tree.XferStatus(status.value), **ACK)
    read = messages.decode_to_consumer(msgspec.msgpack.encode(theirs))
    assert read == messages.XferAck(status=status, **ACK)


@pytest.mark.parametrize("ours", [{}, OUR_REQUEST_FIELDS])
def test_our_request_decodes_there(ours: dict[str, Any]) -> None:
    """With our fields or without, they read the same base values and our version."""
    frame = messages.encode(messages.XferReq(**REQUEST, **ours))
    read = msgspec.msgpack.decode(frame, type=in_tree.XferReq)
    assert read == in_tree.XferReq(**REQUEST, connector_version=messages.EC_CONNECTOR_VERSION)


@pytest.mark.parametrize("ours", [{}, OUR_ACK_FIELDS])
@pytest.mark.parametrize("status", list(messages.XferStatus))
def test_our_ack_decodes_there(status: messages.XferStatus, ours: dict[str, Any]) -> None:
    """With our fields or without, they read the same base values."""
    frame = messages.encode(messages.XferAck(status=status, **ACK, **ours))
    read = msgspec.msgpack.decode(frame, type=in_tree.XferAck)
    assert read == in_tree.XferAck(status=in_tree.XferStatus(status.value), **ACK)


def test_base_ack_holds_what_theirs_holds() -> None:
    """To a peer that knows base fields only, our answer has the fields of its own."""
    ours = messages.XferAck(status=messages.XferStatus.OK, **ACK)
    theirs = in_tree.XferAck(status=in_tree.XferStatus.OK, **ACK)
    assert list(msgspec.msgpack.decode(messages.encode(ours)).items()) == list(
        msgspec.msgpack.decode(msgspec.msgpack.encode(theirs)).items()
    )


def test_golden_in_tree_frame_is_what_they_write() -> None:
    """The frame that is kept as theirs is."""
    frame = (GOLDEN / "in_tree_req_without_version.bin").read_bytes()
    read = msgspec.msgpack.decode(frame, type=in_tree.XferReq)
    assert msgspec.msgpack.encode(read) == frame


@pytest.mark.parametrize(
    "factors",
    [
        ("0.32.0", "acme/tiny-vl", "torch.bfloat16", 8192),
        ("0.33.0rc1", 'a "quoted" path/é', "torch.float32", 0),
        ("", "", "", 1 << 40),
    ],
)
def test_hash_agrees(factors: tuple[str, str, str, int]) -> None:
    """The four factors hash alike, whatever characters they have."""
    theirs = in_tree.compute_ec_compatibility_hash(*factors)
    assert fingerprint.compute_ec_compatibility_hash(*factors) == theirs
