# SPDX-License-Identifier: Apache-2.0
"""Messages over a local stream socket, however its bytes are cut."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ec_connector.agent import channel as module
from ec_connector.agent.channel import Channel, accept, connect, listen
from ec_connector.protocol.local import MAX_LOCAL_BYTES


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel and the raw other end of it."""
    one, other = socket.socketpair()
    channel = Channel(one)
    yield channel, other
    channel.close()
    other.close()


def framed(*messages: bytes) -> bytes:
    """Messages as they travel."""
    return b"".join(len(one).to_bytes(4, "little") + one for one in messages)


def test_byte_by_byte(ends: tuple[Channel, socket.socket]) -> None:
    """A message is complete with its last byte, not before."""
    channel, other = ends
    got = []
    for byte in framed(b"one", b"", b"three" * 100):
        assert channel.receive() == []
        other.send(bytes([byte]))
        got += channel.receive()
    assert got == [b"one", b"", b"three" * 100]


def test_several_at_once_and_a_part(ends: tuple[Channel, socket.socket]) -> None:
    """What is whole comes at once, the rest later."""
    channel, other = ends
    data = framed(b"a", b"b" * 1000, b"c")
    other.send(data[:-1])
    assert channel.receive() == [b"a", b"b" * 1000]
    other.send(data[-1:])
    assert channel.receive() == [b"c"]


def test_long_ones_pass_a_slow_reader(ends: tuple[Channel, socket.socket]) -> None:
    """What the kernel does not take is kept, and arrives in order."""
    channel, other = ends
    reader = Channel(other)
    messages = [bytes([number]) * (1 << 20) for number in range(4)]
    for message in messages:
        assert channel.send(message)
    assert channel.unsent > 0
    got: list[bytes] = []
    while len(got) < len(messages):
        got += reader.receive()
        channel.flush()
    assert got == messages
    assert channel.unsent == 0


def test_one_that_never_reads(
    ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept for it is bounded."""
    channel, _ = ends
    monkeypatch.setattr(module, "MAX_QUEUED_BYTES", 4 << 20)
    sent = 0
    while channel.send(bytes(1 << 20)):
        sent += 1
        assert sent < 10
    assert channel.unsent <= 5 << 20
    assert not channel.ended


def test_too_long() -> None:
    """A length beyond the limit ends the connection before anything is allocated."""
    one, other = socket.socketpair()
    channel = Channel(one)
    assert not channel.send(bytes(MAX_LOCAL_BYTES + 1))
    other.send((MAX_LOCAL_BYTES + 1).to_bytes(4, "little"))
    assert channel.receive() == []
    assert channel.ended
    channel.close()
    other.close()


def test_other_end_gone(ends: tuple[Channel, socket.socket]) -> None:
    """Neither reading nor writing raises."""
    channel, other = ends
    other.close()
    assert channel.receive() == []
    assert channel.ended
    assert not channel.send(b"x")


def test_listen_and_connect() -> None:
    """A name in the kernel only, and both ends of one user."""
    listener, endpoint = listen()
    assert endpoint.startswith("ipc://@ec-connector-")
    client = connect(endpoint)
    server = accept(listener)
    assert server is not None
    assert accept(listener) is None
    client.send(b"hello")
    assert server.receive() == [b"hello"]
    for end in (client, server):
        end.close()
    listener.close()
    with pytest.raises(OSError, match="refused"):
        connect(endpoint)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away() -> None:
    """The kernel says who is at the other end."""
    listener, endpoint = listen()
    code = f"""
import os
from ec_connector.agent.channel import connect
os.setuid(65534)
try:
    connect({endpoint!r})
except PermissionError as error:
    print("refused:", error)
"""
    stranger = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
    )
    assert stranger.stdout.startswith("refused:"), stranger.stderr
    assert accept(listener) is None
    listener.close()
