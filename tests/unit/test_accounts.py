# SPDX-License-Identifier: Apache-2.0
"""What transfers cost: the record of each, at both ends, and the sums."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from ec_connector import Consumer, Producer
from ec_connector.cli.agents import look
from ec_connector.errors import ConfigError, ItemMissingError
from ec_connector.protocol.account import CONSUMER, PACKING, PRODUCER, Account
from ec_connector.protocol.ledger import KEPT, MAX_PEERS, Ledger
from ec_connector.protocol.local import State, Transfer
from ec_connector.protocol.messages import XferReq
from ec_connector.testing import Pair

PATIENCE = 15.0


def stages(account: Account | Transfer) -> dict[str, float]:
    """Seconds by stage, without those beside the others and those that took no time."""
    return {
        stage: pytest.approx(spent)
        for stage, spent in account.seconds.items()
        if stage != PACKING and spent
    }


def test_both_ends_of_a_transfer() -> None:
    """What one end sends is what the other receives, and each second is in one stage."""
    pair = Pair()
    pair.reserve("a", 15_000)
    pair.fetch("a", 15_000)
    pair.advance(0.5)
    pair.save("a", bytes(15_000))
    pair.advance(0.25)
    pair.ready("a")
    assert pair.fetched == []  # it is still being loaded
    pair.advance(0.125)
    pair.loaded("a")
    pair.advance(60.0)  # the request is still being answered
    for _ in range(2):  # what was said once is not booked again
        pair.loaded("a")
        pair.release("a")
    (there,), (here,) = pair.served, pair.fetched
    assert (there.outcome, here.outcome) == ("done", "delivered")
    assert (there.nbytes, here.nbytes) == (15_000, 15_000)
    assert there.payload_out == here.payload_in == 15_000
    assert there.header_out == here.header_in > 0
    assert there.header_in == here.header_out > 0
    assert there.payload_in == here.payload_out == 0
    assert stages(there) == {"waiting": 0.5}
    assert stages(here) == {"waiting": 0.5, "loading": 0.375}
    assert here.total == pytest.approx(0.875)
    assert here.plane == there.plane == "zmq"


def test_memory_plane() -> None:
    """The consumer copies, and the producer only shows: no payload leaves it."""
    pair = Pair(planes=("memory", "zmq"))
    pair.save("a", bytes(700))
    pair.hold_copies = True
    pair.fetch("a", 700)
    pair.advance(0.5)
    pair.hold_copies = False
    pair.run()
    pair.release("a")
    (there,), (here,) = pair.served, pair.fetched
    assert here.plane == there.plane == "memory"
    assert (here.payload_in, there.payload_out) == (700, 0)
    assert stages(here) == {"receiving": 0.5}
    assert stages(there) == {"sending": 0.5}


def test_a_transfer_that_fails_is_booked() -> None:
    """With the reason, and all the time it was waited for."""
    pair = Pair()
    pair.partition()
    pair.fetch("a", 700, timeout=1.0)
    pair.advance(5.0)
    (here,) = pair.fetched
    assert (here.outcome, here.payload_in) == ("deadline", 0)
    assert stages(here) == {"waiting": 1.0}


def test_one_transfer_for_many_clients_is_one_record() -> None:
    """It is over with the first that gives it back; one that gave up is no outcome of it."""
    pair = Pair()
    pair.reserve("a", 700)
    pair.fetch("a", 700, b"hasty", timeout=0.5)
    for client in (b"one", b"two"):
        pair.fetch("a", 700, client)
    pair.advance(1.0)
    pair.save("a", bytes(700))
    pair.run()
    pair.release("a", b"two")
    pair.advance(1.0)
    pair.release("a", b"one")
    (here,) = pair.fetched
    assert (here.outcome, here.total) == ("delivered", pytest.approx(1.0))


def test_a_transfer_that_found_no_room_is_booked() -> None:
    """It never asked, and was waited for all the same."""
    pair = Pair(blocks=4)
    pair.save("a", bytes(3000))
    pair.fetch("a", 3000)
    pair.run()
    pair.fetch("b", 3000, timeout=1.0)
    pair.advance(5.0)
    (here,) = pair.fetched
    assert (here.item, here.outcome, here.header_out) == ("b", "pool_full", 0)
    assert stages(here) == {"waiting": 1.0}


def test_what_the_pool_had_is_no_transfer() -> None:
    """Nothing was moved."""
    pair = Pair()
    pair.save("a", bytes(700))
    for _ in range(2):
        pair.fetch("a", 700)
        pair.run()
        pair.release("a")
    assert len(pair.fetched) == 1


def test_a_peer_of_base_fields_is_booked() -> None:
    """It says no "done": the transfer is over when its bytes have left."""
    pair = Pair()
    pair.save("a", bytes(700))
    pair._connect()
    pair._dialled = True
    pair._do(pair.producer.asked(pair._peer, XferReq("a", ""), pair.clock.now, host="192.0.2.1"))
    pair.transport.to_consumer.take()
    pair._sweep()
    (there,) = pair.served
    assert (there.outcome, there.payload_out, there.peer) == ("sent whole", 700, "192.0.2.1")


def account(host: str = "192.0.2.1", outcome: str = "delivered", **fields: Any) -> Account:
    return Account("item", host, f"{host}:1", CONSUMER, 0.0, outcome=outcome, **fields)


def test_sums_by_link() -> None:
    """Bytes by part, seconds by stage, transfers by outcome: each under its link and role."""
    ledger = Ledger("wan", frozenset({"192.0.2.9"}))
    ledger.book(account(header_in=10, payload_in=1000), 2.0)
    ledger.book(account(outcome="lease over"), 1.0)
    for host in ("127.0.0.1", "::1", "localhost", "192.0.2.9"):
        ledger.book(account(host, payload_in=1), 1.0)
    ledger.book(account(plane="memory"), 1.0)
    links = ledger.links()
    assert links["transfers"] == {
        "wan consumer delivered": 1,
        "wan consumer lease_over": 1,
        "loopback consumer delivered": 5,
    }
    assert links["bytes"]["wan consumer header_in"] == 10
    assert links["bytes"]["wan consumer payload_in"] == 1000
    assert links["bytes"]["loopback consumer payload_in"] == 4
    assert links["seconds"] == {"wan consumer waiting": 3.0, "loopback consumer waiting": 5.0}


def test_books_are_bounded() -> None:
    """The latest transfers, and the peers heard of last; the sums stay whole."""
    ledger = Ledger("lan")
    for n in range(KEPT + MAX_PEERS):
        ledger.book(account(f"host-{n}"), 1.0)
    recent = ledger.recent()
    assert [recent[0].number, recent[-1].number] == [MAX_PEERS + 1, KEPT + MAX_PEERS]
    assert [one.number for one in ledger.recent(KEPT + MAX_PEERS - 2)] == [
        KEPT + MAX_PEERS - 1,
        KEPT + MAX_PEERS,
    ]
    assert len(ledger.peers()) == MAX_PEERS
    assert ledger.peers()[-1].peer == f"host-{KEPT + MAX_PEERS - 1}:1"
    assert ledger.links()["transfers"] == {"lan consumer delivered": KEPT + MAX_PEERS}


@pytest.mark.parametrize("link", ["", "loopback", "two words", "a" * 33, "{x}"])
def test_link_that_is_no_name(link: str) -> None:
    """It becomes a label of metrics, so it is a short word, and none that is taken."""
    with pytest.raises(ConfigError, match="link="):
        Consumer(link=link)


def state_of(member: Producer | Consumer, transfers: int) -> State:
    """What a member's agent says when it has booked so many transfers."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        (found,) = look(member._link.endpoint)
        if len(found.transfers) >= transfers:
            return found
        time.sleep(0.02)
    raise AssertionError("too few transfers")


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_agents_keep_books(codec: str) -> None:
    """Over real sockets both ends agree on what went over the link."""
    if codec != "none":
        pytest.importorskip("zstandard", reason="codec zstd; it is in the test extra")
    options: dict[str, Any] = {"pool_size": "32MiB", "planes": ["zmq"], "codecs": [codec, "none"]}
    if codec == "none":
        options["codecs"] = ["none"]
    rows = np.zeros((2000, 1000), np.float16)
    with Producer(**options) as producer, Consumer(**options) as consumer:
        announcement = producer.put("a", rows)
        assert (consumer.fetch("a", announcement, timeout=PATIENCE) == rows).all()
        with pytest.raises(ItemMissingError):
            consumer.fetch("b", announcement, timeout=PATIENCE)
        here, there = state_of(consumer, 2), state_of(producer, 1)
        got, missed = here.transfers
        (gave,) = there.transfers
        assert (got.outcome, missed.outcome, gave.outcome) == ("delivered", "missing", "done")
        assert (got.role, gave.role) == (CONSUMER, PRODUCER)
        assert got.link == gave.link == "loopback"
        assert got.codec == gave.codec == ("" if codec == "none" else codec)
        assert got.nbytes == gave.nbytes == rows.nbytes
        assert got.payload_in == gave.payload_out
        assert (got.payload_in == rows.nbytes) == (codec == "none")
        assert got.header_in == gave.header_out
        assert got.header_out == gave.header_in
        assert got.peer == there.address
        assert gave.peer == "127.0.0.1"
        for one, stage in ((got, "receiving"), (gave, "sending")):
            assert one.seconds[stage] > 0
            beside = one.seconds.get(PACKING, 0.0)
            assert sum(one.seconds.values()) - beside == pytest.approx(one.total)
            assert (beside > 0) == (codec != "none")
        (sums,) = here.peers
        assert (sums.transfers, sums.failed) == (2, 1)
        assert here.links["bytes"]["loopback consumer payload_in"] == got.payload_in
