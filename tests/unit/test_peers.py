# SPDX-License-Identifier: Apache-2.0
"""Dialling producers: what may be dialled, names that stand for several addresses, odd hosts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from ec_connector.agent.listen import bind_peers
from ec_connector.agent.peers import MAX_LOOKUPS, Change, Down, PeerSockets, Refused, Up
from ec_connector.agent.reactor import Reactor
from ec_connector.protocol.addresses import AllowList
from ec_connector.protocol.effects import Address

PATIENCE = 10.0


class Dialler:
    """The sockets of one agent and a loop for them."""

    def __init__(self, allowed: list[str]) -> None:
        self.context = zmq.Context()
        self.reactor = Reactor()
        self.got: list[bytes] = []
        self.peers = PeerSockets(
            self.context, self.reactor, AllowList.parse(allowed), 1 << 20, self.read
        )

    def read(self, _address: Address, dealer: zmq.Socket[bytes]) -> None:
        self.got.append(dealer.recv_multipart()[-1])

    def until(self, wanted: Callable[[list[Change]], bool]) -> list[Change]:
        """Turn until the changes so far are what is wanted, or time is over."""
        seen: list[Change] = []
        end = time.monotonic() + PATIENCE
        while not wanted(seen) and time.monotonic() < end:
            self.reactor.turn(0 if self.peers.pending() else 50)
            seen += self.peers.changes()
        return seen

    def close(self) -> None:
        self.peers.close_all()
        self.context.destroy(linger=0)


@pytest.fixture
def dialler() -> Iterator[Dialler]:
    """Allowed to dial this host, two names and those of one domain."""
    dialler = Dialler(["127.0.0.0/8", "::1", "several.test", "elsewhere.test", "*.many.test"])
    yield dialler
    dialler.close()


@pytest.fixture
def router() -> Iterator[tuple[zmq.Socket[bytes], int]]:
    """A producer's socket, on one address of this host."""
    context = zmq.Context()
    yield bind_peers(context, "127.0.0.1", 0)
    context.destroy(linger=0)


def resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have every name stand for these addresses."""
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kinds: infos)


def test_a_message_waits_for_the_connection(
    dialler: Dialler, router: tuple[zmq.Socket[bytes], int]
) -> None:
    """What is sent before the connection is up arrives when it is."""
    address = Address("127.0.0.1", router[1])
    dialler.peers.open(address)
    assert dialler.peers.send(address, b"early")
    assert dialler.until(lambda seen: Up(address) in seen)[-1] == Up(address)
    assert router[0].poll(PATIENCE * 1000)
    identity, empty, body = router[0].recv_multipart()
    assert (empty, body) == (b"", b"early")
    router[0].send_multipart([identity, b"", b"answer"])
    dialler.until(lambda _: bool(dialler.got))
    assert dialler.got == [b"answer"]


def test_every_address_of_a_name_is_tried(
    dialler: Dialler, router: tuple[zmq.Socket[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first refuses, the second answers; what was asked meanwhile is asked again on Up."""
    resolves_to(monkeypatch, "127.0.0.2", "127.0.0.1", "127.0.0.3")
    address = Address("several.test", router[1])
    dialler.peers.open(address)
    seen = dialler.until(lambda seen: Up(address) in seen)
    assert seen[-1] == Up(address)


def test_one_bad_address_of_a_name_is_enough(
    dialler: Dialler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a name stands for is checked as a whole, and nothing is dialled."""
    resolves_to(monkeypatch, "127.0.0.1", "169.254.169.254")
    address = Address("elsewhere.test", 5000)
    dialler.peers.open(address)
    (change,) = dialler.until(bool)
    assert isinstance(change, Refused)
    assert "169.254.169.254" in change.message


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("10.0.0.1", 5000),
        ("169.254.169.254", 80),
        ("224.0.0.1", 5000),
        ("0.0.0.0", 5000),
        ("", 5000),
        ("a" * 300, 5000),
        ("bro\ud800ken", 5000),
        ("nul\0byte", 5000),
        ("[::1]", 5000),
        ("127.0.0.1", 0),
        ("127.0.0.1", 70_000),
        ("127.0.0.1", -1),
        ("localhost", 2**70),
    ],
)
def test_refused(host: str, port: int, dialler: Dialler) -> None:
    """A reason, never an exception, and the loop goes on."""
    address = Address(host, port)
    dialler.peers.open(address)
    (change,) = dialler.until(bool)
    assert isinstance(change, Refused)
    assert change.message


def test_nobody_listens(dialler: Dialler) -> None:
    """A refused connection is told of, and retried."""
    address = Address("127.0.0.1", 1)
    dialler.peers.open(address)
    assert Down(address) in dialler.until(lambda seen: Down(address) in seen)
    dialler.peers.close(address)
    assert not dialler.peers.send(address, b"late")


def test_names_are_looked_up_in_bounds(dialler: Dialler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that name a thousand hosts get no thousand threads; afterwards names count again."""
    answered = threading.Event()

    def slow(*_args: object, **_kinds: object) -> list[object]:
        answered.wait(PATIENCE)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    addresses = [Address(f"host-{number}.many.test", 5000) for number in range(1000)]
    before = threading.active_count()
    for address in addresses:
        dialler.peers.open(address)
    assert threading.active_count() - before <= MAX_LOOKUPS
    assert len(dialler.peers.changes()) == len(addresses) - MAX_LOOKUPS
    answered.set()
    assert len(dialler.until(lambda seen: len(seen) == MAX_LOOKUPS)) == MAX_LOOKUPS
    for address in addresses:
        dialler.peers.close(address)
    dialler.peers.open(addresses[-1])
    (change,) = dialler.until(bool)
    assert isinstance(change, Refused)
    assert "does not resolve" in change.message


@pytest.mark.parametrize("host", ["client-s.choice.test", "0x7f.1", "a b", "several.test."])
def test_names_that_cannot_be_allowed_are_not_looked_up(
    host: str, dialler: Dialler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client makes this agent ask no name server for a name that no entry could allow."""
    asked: list[str] = []

    def noted(name: str, *_args: object, **_kinds: object) -> list[object]:
        asked.append(name)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    dialler.peers.open(Address(host, 5000))
    (change,) = dialler.until(bool)
    assert isinstance(change, Refused)
    listed = host == "several.test."
    assert asked == ([host] if listed else [])
    assert ("not looked up" in change.message) != listed
