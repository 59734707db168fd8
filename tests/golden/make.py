# SPDX-License-Identifier: Apache-2.0
"""Writes the golden frames of the current wire version: ``python tests/golden/make.py``.

Each case is two files: ``NAME.bin`` is the body as it stands on the wire, ``NAME.json``
says what it means (every field, bytes as base64). A file that exists is never written
again: frames of a released version do not change, so a case is only ever added.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ec_connector.protocol.messages import (
    EC_CONNECTOR_VERSION,
    RegionRef,
    ToConsumer,
    ToProducer,
    XferAck,
    XferChunk,
    XferCredit,
    XferDone,
    XferPing,
    XferPong,
    XferReq,
    XferStatus,
    encode,
)

FOLDER = Path(__file__).parent / f"v{EC_CONNECTOR_VERSION}"

HASH = "3b1f0a5c9d2e4f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"
COMPATIBILITY = "71a0470cd882f7e3b8b5e888c26a538d55a2b07de2aa6711415ddbd25008d44b"
SESSION = "consumer-7f3a"
REGION = RegionRef(pid=4242, fd=17, nbytes=1 << 30, block_bytes=1 << 16, token="00ff" * 8)

OURS: dict[str, tuple[str, ToProducer | ToConsumer]] = {
    "req_base": (
        "base fields only: the version is there all the same",
        XferReq(HASH, COMPATIBILITY, SESSION, 1),
    ),
    "req_full": (
        "every field",
        XferReq(
            mm_hash=HASH,
            compatibility_hash=COMPATIBILITY,
            session_id=SESSION,
            connector_version=1,
            xfer_id=70000,
            fingerprint={"dtype": "bfloat16", "weights": "9c1185a5c5e9fc54"},
            planes=["memory", "zmq"],
            credit_bytes=8 << 20,
            chunk_bytes=1 << 20,
            timeout_ms=10_000,
        ),
    ),
    "req_other_version": (
        "a version that no release has spoken, for the gate",
        XferReq(HASH, COMPATIBILITY, SESSION, 200),
    ),
    "req_ticket": (
        "with the announcement's ticket",
        XferReq(HASH, COMPATIBILITY, SESSION, 1, xfer_id=8, ticket=COMPATIBILITY),
    ),
    "req_codecs": (
        "rows may come packed, best codec first",
        XferReq(HASH, COMPATIBILITY, SESSION, 1, xfer_id=9, codecs=["zstd", "none"]),
    ),
    "req_odd_identifier": (
        "an identifier is any text: a LoRA name, a client's uuid",
        XferReq("lora-é:../☃", COMPATIBILITY, SESSION, 1, xfer_id=1),
    ),
    "ping": ("what are you?", XferPing(1 << 40, COMPATIBILITY)),
    "pong": (
        "all that a request would be compared with, and how full the pool is",
        XferPong(
            1 << 40,
            compatibility_hash=COMPATIBILITY,
            connector_version=1,
            fingerprint={"dtype": "bfloat16", "weights": "9c1185a5c5e9fc54"},
            planes=["memory", "zmq"],
            codecs=["zstd", "none"],
            block_bytes=1 << 16,
            blocks=16384,
            blocks_free=16000,
            blocks_pinned=5,
            items=96,
            grants=2,
            parked=1,
        ),
    ),
    "pong_withheld": ("the ping had no ticket that counts", XferPong(7, withheld=True)),
    "ack_ok_whole": (
        "granted over ZMQ, the payload frame follows",
        XferAck(
            HASH, XferStatus.OK, SESSION, xfer_id=1, plane="zmq", nbytes=131072,
            dtype="bfloat16", shape=[256, 256],
        ),
    ),
    "ack_ok_codec": (
        "granted over ZMQ, chunks follow that may be packed",
        XferAck(
            HASH, XferStatus.OK, SESSION, xfer_id=9, plane="zmq", nbytes=131072,
            dtype="bfloat16", shape=[256, 256], codec="zstd",
        ),
    ),
    "ack_ok_memory": (
        "granted through the producer's memory, in two extents",
        XferAck(
            HASH, XferStatus.OK, SESSION, xfer_id=2, plane="memory", nbytes=131072,
            dtype="float32", shape=[128, 256], generation=1 << 40,
            extents=[(0, 1), (16383, 1)], region=REGION,
        ),
    ),
    "ack_ok_memory_proven": (
        "granted through the producer's memory, which it proves to show",
        XferAck(
            HASH, XferStatus.OK, SESSION, xfer_id=2, plane="memory", nbytes=131072,
            dtype="float32", shape=[128, 256], generation=7, extents=[(0, 2)], region=REGION,
            proof=bytes(range(240, 256)),
        ),
    ),
    "ack_ok_scalar": (
        "an array of no axes stays one",
        XferAck(HASH, XferStatus.OK, SESSION, xfer_id=3, plane="zmq", nbytes=2, dtype="float16"),
    ),
    "ack_to_base_peer": (
        "granted to a peer that sent base fields only: base fields only",
        XferAck(HASH, XferStatus.OK, SESSION),
    ),
    "ack_in_tree_fields": (
        "the in-tree fields that this package leaves empty",
        XferAck(HASH, XferStatus.OK, SESSION, [0, 5, 70000], b"\x00nixl\xff", b"descriptor"),
    ),
    "ack_missing": (
        "neither held nor being saved",
        XferAck(HASH, XferStatus.NACK_MISSING, SESSION, xfer_id=4, message="not held"),
    ),
    "ack_incompatible": (
        "the factor that differs is named",
        XferAck(
            HASH, XferStatus.NACK_INCOMPAT, SESSION, xfer_id=5, factor="weights",
            message="weights: 9c11 here, 77aa there",
        ),
    ),
    "ack_version": (
        "another wire version",
        XferAck(HASH, XferStatus.NACK_VERSION, SESSION, message="version 1 here, 200 asked"),
    ),
    "ack_internal": (
        "the save failed: message and traceback of the producer",
        XferAck(
            HASH, XferStatus.NACK_INTERNAL, SESSION, xfer_id=6, message="RuntimeError: no",
            traceback='Traceback (most recent call last):\n  File "worker.py"\n',
        ),
    ),
    "ack_not_ready": (
        "still being saved when the consumer's patience ended",
        XferAck(HASH, XferStatus.NACK_NOT_READY, SESSION, xfer_id=7),
    ),
    "chunk_first": (
        "offset 0 is a default and left out",
        XferChunk(SESSION, 70000, 0, 1 << 20),
    ),
    "chunk_later": ("beyond 4 GiB", XferChunk(SESSION, 70000, 5 << 30, 1 << 20)),
    "chunk_packed": (
        "a MiB of rows in fewer bytes, and their CRC-32",
        XferChunk(SESSION, 9, 0, 1 << 20, "zstd", 712_345, 0xCAFEF00D),
    ),
    "credit": ("one chunk more", XferCredit(SESSION, HASH, 70000, 1 << 20)),
    "done": ("unpin", XferDone(SESSION, HASH, 70000)),
    "done_to_base_peer": ("without a transfer number", XferDone(SESSION, HASH)),
}  # fmt: skip

# What other encoders write, and how it is to be read here.
OTHERS: dict[str, tuple[str, dict[str, Any], ToProducer | ToConsumer]] = {
    "in_tree_req_without_version": (
        "as vLLM 0.32 writes it: the version is a default and left out, which means 1",
        {
            "type": "req",
            "mm_hash": HASH,
            "compatibility_hash": COMPATIBILITY,
            "session_id": SESSION,
        },
        XferReq(HASH, COMPATIBILITY, SESSION, 1),
    ),
    "later_req_with_unknown_fields": (
        "fields of a later release are ignored",
        {
            "type": "req",
            "mm_hash": HASH,
            "compatibility_hash": COMPATIBILITY,
            "connector_version": 1,
            "traceparent": "00-4bf9",
            "later": {"nested": [1, 2.5, None, b"x"]},
        },
        XferReq(HASH, COMPATIBILITY, "", 1),
    ),
}


def describe(why: str, message: ToProducer | ToConsumer, *, ours: bool) -> str:
    """The JSON beside a frame, with every field written out."""
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    return json.dumps(
        {
            "why": why,
            "kind": type(message).__name__,
            "encoded_here": ours,
            "fields": json.loads(msgspec.json.encode(fields)),
        },
        indent=2,
    )


def main() -> None:
    """Write the cases that have no file yet."""
    FOLDER.mkdir(exist_ok=True)
    frames = {
        **{name: (describe(why, m, ours=True), encode(m)) for name, (why, m) in OURS.items()},
        **{
            name: (describe(why, m, ours=False), msgspec.msgpack.encode(frame))
            for name, (why, frame, m) in OTHERS.items()
        },
    }
    for name, (description, frame) in frames.items():
        path = FOLDER / f"{name}.bin"
        if not path.exists():
            path.write_bytes(frame)
            path.with_suffix(".json").write_text(description + "\n")
            print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
