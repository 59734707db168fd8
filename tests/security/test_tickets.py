# SPDX-License-Identifier: Apache-2.0
"""Tickets: what a producer of the fleet did not announce is neither dialled nor served."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from ec_connector import Consumer, Producer
from ec_connector.errors import (
    ConfigError,
    ItemMissingError,
    PeerRefusedError,
    PeerUnreachableError,
)
from ec_connector.protocol.messages import XferReq, decode_to_consumer, encode
from ec_connector.protocol.tickets import MAX_TICKET_CHARS, Tickets
from ec_connector.ticket_file import load_tickets

PATIENCE = 10.0
ROWS = np.arange(600, dtype=np.float32).reshape(10, 60)
ITEM: tuple[Any, ...] = ("a", "10.0.0.1", 5000, 2400, "float32", (10, 60))
OTHERS: list[tuple[Any, ...]] = [
    ("b", *ITEM[1:]),
    ("a", "10.0.0.2", *ITEM[2:]),
    (*ITEM[:2], 5001, *ITEM[3:]),
    (*ITEM[:3], 2401, *ITEM[4:]),
    (*ITEM[:4], "int32", ITEM[5]),
    (*ITEM[:5], (60, 10)),
]


def key_file(path: Path, *keys: str) -> str:
    """A ticket key file with these keys, or with a new one."""
    path.write_text("\n".join(keys or [secrets.token_hex(32)]))
    path.chmod(0o600)
    return str(path)


# ── the text itself ──────────────────────────────────────────────────────────


def test_same_announcement_same_ticket() -> None:
    """Repeated announcements stay equal; the ticket has its one length."""
    tickets = Tickets([b"k" * 32])
    assert tickets.sign(*ITEM) == Tickets([b"k" * 32]).sign(*ITEM)
    assert len(tickets.sign(*ITEM)) == MAX_TICKET_CHARS
    assert tickets.verify(tickets.sign(*ITEM), *ITEM)


@pytest.mark.parametrize("other", OTHERS, ids=["item", "host", "port", "size", "dtype", "shape"])
def test_each_fact_counts(other: tuple[Any, ...]) -> None:
    """A ticket is for one item of one form at one address."""
    tickets = Tickets([b"k" * 32])
    assert not tickets.verify(tickets.sign(*ITEM), *other)


@pytest.mark.parametrize("forged", ["", "0" * 64, "é" * 64, "\ud800", "x" * 10_000])
def test_forgeries(forged: str) -> None:
    """Whatever text comes, the answer is no, not an exception."""
    assert not Tickets([b"k" * 32]).verify(forged, *ITEM)
    assert not Tickets([b"k" * 32]).verify(Tickets([b"j" * 32]).sign(*ITEM), *ITEM)


def test_keys_change_without_a_gap() -> None:
    """Both keys first, then the new one signs, then the old one goes: each step meets the next."""
    steps = [[b"o"], [b"o", b"n"], [b"n", b"o"], [b"n"]]
    for before, after in itertools.pairwise(steps):
        for signs, checks in ((before, after), (after, before)):
            assert Tickets(checks).verify(Tickets(signs).sign(*ITEM), *ITEM)
    assert not Tickets([b"n"]).verify(Tickets([b"o"]).sign(*ITEM), *ITEM)


def test_bad_key_files(tmp_path: Path) -> None:
    """Refused with the file's name and without its text."""
    path = tmp_path / "ticket_key"
    good = secrets.token_hex(32)
    for text in ("", good[:-1], f"{good}\n{good}\n{good}", good.upper() + "x", "pässword"):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="ticket_key") as caught:
            load_tickets(str(path))
        assert good[:12] not in str(caught.value)
    path.write_text(good)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_tickets(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tickets(str(tmp_path / "none"))
    assert load_tickets("") is None


# ── between real agents ──────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fleet's ticket key."""
    return key_file(tmp_path_factory.mktemp("fleet") / "ticket_key")


@pytest.fixture(scope="module")
def producer(key: str) -> Iterator[Producer]:
    """A producer that signs, and serves what is signed."""
    with Producer(ticket_key=key, pool_size="4MiB") as producer:
        yield producer


@pytest.fixture(scope="module", params=[["memory"], ["zmq"]], ids=lambda planes: planes[0])
def consumer(request: pytest.FixtureRequest, key: str) -> Iterator[Consumer]:
    """A consumer that dials what is signed."""
    settings: dict[str, Any] = {"planes": request.param, "connect_timeout": "300ms"}
    with Consumer(ticket_key=key, pool_size="4MiB", **settings) as consumer:
        yield consumer


def test_signed_items_arrive(producer: Producer, consumer: Consumer) -> None:
    """Bytes right; the same announcement each time."""
    announcement = producer.put("signed", ROWS)
    assert (consumer.fetch("signed", announcement, timeout=PATIENCE) == ROWS).all()
    assert producer.put("signed", ROWS) == announcement


@pytest.mark.parametrize("change", ["none", "forged", "of another item", "port", "host", "shape"])
def test_changed_announcements_are_not_dialled(
    producer: Producer, consumer: Consumer, change: str
) -> None:
    """Refused by the consumer, by name of the reason."""
    name = f"changed {change}"
    announcement = producer.put(name, ROWS)
    other = producer.put("another item", ROWS)
    announcement |= {
        "none": {"ticket": ""},
        "forged": {"ticket": "0" * 64},
        "of another item": {"ticket": other["ticket"]},
        "port": {"peer_port": announcement["peer_port"] ^ 1},
        "host": {"peer_host": "127.0.0.2"},
        "shape": {"shape": [60, 10]},
    }[change]
    with pytest.raises(PeerRefusedError, match="ticket"):
        consumer.fetch(name, announcement, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("host", "error"),
    [
        ("192.0.2.1", PeerUnreachableError),  # nobody's: allowed, and not there
        ("169.254.169.254", PeerRefusedError),
        ("224.0.0.1", PeerRefusedError),
        ("0.0.0.0", PeerRefusedError),
    ],
)
def test_where_a_ticket_leads(
    consumer: Consumer, key: str, host: str, error: type[Exception]
) -> None:
    """Beyond the default list of peers, and never to what is always refused."""
    tickets = load_tickets(key)
    assert tickets is not None
    entry = {"peer_host": host, "peer_port": 5000, "size_bytes": 4, "dtype": "uint8", "shape": [4]}
    ticket = tickets.sign("elsewhere", host, 5000, 4, "uint8", [4])
    with pytest.raises(error):
        consumer.fetch("elsewhere", {**entry, "ticket": ticket}, timeout=PATIENCE)


def test_a_producer_serves_tickets_alone(producer: Producer) -> None:
    """Without its ticket an item looks as if it were not there, to the last word."""
    announcement = producer.put("mine", ROWS)
    other = producer.put("other", ROWS)
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{announcement['peer_port']}")

            def ask(name: str, ticket: str) -> tuple[int, str]:
                req = XferReq(name, "", session_id="s", planes=["zmq"], ticket=ticket)
                dealer.send_multipart([b"", encode(req)])
                assert dealer.poll(PATIENCE * 1000)
                ack = decode_to_consumer(dealer.recv_multipart()[1])
                return ack.status, ack.message  # type: ignore[union-attr]

            absent = ask("absent", "")
            assert absent[0] != 0
            tries = ["", "0" * 64, other["ticket"]]
            assert [ask("mine", ticket) for ticket in tries] == [absent] * len(tries)
            assert ask("mine", announcement["ticket"])[0] == 0
            print(f"tickets: attempts {len(tries)}, got in 0")
    finally:
        context.destroy(linger=0)


def test_a_consumer_of_another_fleet(producer: Producer, tmp_path: Path) -> None:
    """It does not dial; and one that checks nothing is served only by what it carries."""
    announcement = producer.put("fleet", ROWS)
    theirs = key_file(tmp_path / "theirs")
    with Consumer(ticket_key=theirs, pool_size="1MiB") as other, pytest.raises(PeerRefusedError):
        other.fetch("fleet", announcement, timeout=PATIENCE)
    with Consumer(pool_size="1MiB") as unchecked:
        with pytest.raises(ItemMissingError, match="without its ticket"):
            unchecked.fetch("fleet", {**announcement, "ticket": ""}, timeout=PATIENCE)
        assert (unchecked.fetch("fleet", announcement, timeout=PATIENCE) == ROWS).all()


def test_two_keys_between_agents(tmp_path: Path) -> None:
    """While keys change, both sides take what either key signed."""
    old, new = secrets.token_hex(32), secrets.token_hex(32)
    first, second = key_file(tmp_path / "p", old, new), key_file(tmp_path / "c", new, old)
    with (
        Producer(ticket_key=first, pool_size="1MiB") as producer,
        Consumer(ticket_key=second, pool_size="1MiB") as consumer,
    ):
        again = consumer.fetch("a", producer.put("a", ROWS), timeout=PATIENCE)
    assert (again == ROWS).all()
