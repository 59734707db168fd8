# SPDX-License-Identifier: Apache-2.0
"""``ec-connector ping`` and ``top``, against real agents over real sockets."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ec_connector import Consumer, Producer
from ec_connector.curve import make_keys
from ec_connector.errors import AgentLostError
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import PeerSums, State, Transfer
from ec_connector.protocol.messages import XferPing, XferPong
from ec_connector.protocol.tickets import Tickets
from ec_connector.testing import Pair

pytest.importorskip("typer", reason="the cli extra is not installed")
import zmq
from rich.console import Console
from typer.testing import CliRunner

from ec_connector.cli import app as app_module
from ec_connector.cli.agents import Watched, endpoints, states
from ec_connector.cli.ping import fits
from ec_connector.cli.top import screen

PATIENCE = 15.0
SMALL: dict[str, Any] = {"pool_size": "8MiB"}
WHAT = {"model": "tiny", "revision": "1"}


def run(*arguments: str) -> Any:
    """The command's result, in this process."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(app_module.app, arguments)


def address_of(producer: Producer) -> str:
    """Where a producer's peers find it."""
    announcement = producer.put("an item", np.zeros(3))
    return f"{announcement['peer_host']}:{announcement['peer_port']}"


def endpoint_of(member: Producer | Consumer) -> str:
    """Where its agent listens for processes of its host."""
    # Looking for it would connect to the agents of other tests.
    return member._link.endpoint


@pytest.fixture
def producer() -> Iterator[Producer]:
    with Producer(factors=WHAT, **SMALL) as producer:
        yield producer


# ── what a producer says of itself ───────────────────────────────────────────


def test_a_ping_changes_nothing() -> None:
    """It is answered with what is, and leaves no grant, no pin and no table entry."""
    pair = Pair(producer_identity=Identity("c0ffee", WHAT))
    pair.save("a", bytes(3000))
    before = pair.producer_pool.usage()
    pair._connect()
    pair._dialled = True
    pair._do(pair.producer.pinged(pair._peer, XferPing(7)))
    pair.run()
    assert pair.pongs == [
        XferPong(
            7, compatibility_hash="c0ffee", fingerprint=WHAT, planes=["zmq"], codecs=["none"],
            block_bytes=1024, blocks=16, blocks_free=13, items=1,
        )
    ]  # fmt: skip
    assert pair.producer_pool.usage() == before
    pair.validate()


def test_a_ping_has_a_ticket_of_its_own() -> None:
    """It opens nothing else, and no other ticket opens it."""
    tickets, others = Tickets([b"k" * 32]), Tickets([b"o" * 32])
    assert tickets.verify_ping(tickets.sign_ping(7), 7)
    assert not tickets.verify_ping(tickets.sign_ping(7), 8)
    assert not tickets.verify_ping(others.sign_ping(7), 7)
    assert not tickets.verify_ping(tickets.sign("a", "h", 1, 2, "uint8", [2]), 7)
    assert not tickets.verify(tickets.sign_ping(7), "a", "h", 1, 2, "uint8", [2])
    assert not tickets.verify_ping("", 7)


def state(**fields: Any) -> State:
    """What an agent says, with what matters here."""
    rest: dict[str, Any] = {name: {} for name in ("factors", "values", "links", "reasons")}
    rest |= {name: [] for name in ("planes", "codecs", "peers", "transfers")}
    return State(**{"agent_pid": 1, "address": "", "compatibility_hash": "", **rest, **fields})


@pytest.mark.parametrize(
    ("mine", "pong", "factor"),
    [
        ({"model": "a"}, XferPong(1, fingerprint={"model": "a"}), ""),
        ({"model": "a"}, XferPong(1, fingerprint={"model": "b"}), "model"),
        ({"model": "a"}, XferPong(1, fingerprint={"model": "a", "loss": "lossy"}), "loss"),
        ({"model": "a"}, XferPong(1, fingerprint={}, connector_version=9), "wire version"),
    ],
)
def test_fit(mine: dict[str, str], pong: XferPong, factor: str) -> None:
    """As a producer would judge the request of such an agent."""
    (fit,) = fits(pong, [state(factors=mine), state(agent_pid=2)])
    assert (fit.agent_pid, fit.factor) == (1, factor)


# ── ping ─────────────────────────────────────────────────────────────────────


def test_ping_of_one_that_fits(producer: Producer) -> None:
    """Status 0; every factor, plane and codec, the pool, and the round trip."""
    with Consumer(factors=WHAT, **SMALL) as consumer:
        endpoint = endpoint_of(consumer)
        result = run("ping", address_of(producer), "--agent", endpoint, "--count", "3")
        assert result.exit_code == 0, result.output
        for word in ("revision", "tiny", "memory, zmq", "median of 3", "1 items"):
            assert word in result.stdout
        assert f"fits agent {consumer.agent_pid}" in result.stdout


def test_ping_of_one_that_does_not_fit(producer: Producer) -> None:
    """Status 1, and what differs is named, with both values."""
    with Consumer(factors=WHAT | {"revision": "2"}, **SMALL) as consumer:
        endpoint = endpoint_of(consumer)
        result = run("ping", address_of(producer), "--agent", endpoint, "--json")
        assert result.exit_code == 1
        assert "revision differs: '2' here, '1' at the peer" in result.stderr
        (fit,) = json.loads(result.stdout)["fits"]
        assert fit["factor"] == "revision"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other agent of this host is compared with."""
    monkeypatch.setattr("ec_connector.cli.agents.endpoints", list)


@pytest.mark.usefixtures("alone")
def test_ping_with_tickets(tmp_path: Path) -> None:
    """Who has no ticket key learns nothing but that."""
    make_keys(tmp_path / "keys")
    key = str(tmp_path / "keys" / "ticket_key")
    with Producer(factors=WHAT, ticket_key=key, **SMALL) as producer:
        address = address_of(producer)
        result = run("ping", address)
        assert result.exit_code == 1
        assert "answers only who has its ticket_key" in result.stderr
        assert "tiny" not in result.stdout
        result = run("ping", address, "--config", json.dumps({"ticket_key": key}))
        assert result.exit_code == 0, result.output
        assert "tiny" in result.stdout


@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")
def test_ping_with_curve(tmp_path: Path) -> None:
    """It needs the keys of a consumer, and with them says the same."""
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys)
    make_keys(others)
    with Producer(factors=WHAT, curve_keys=str(keys), **SMALL) as producer:
        address = address_of(producer)
        for config in ({}, {"curve_keys": str(others)}):
            result = run("ping", address, "--config", json.dumps(config), "--timeout", "1")
            assert result.exit_code == 1
            assert "curve_keys" in result.stderr
        result = run("ping", address, "--config", json.dumps({"curve_keys": str(keys)}))
        assert result.exit_code == 0, result.output


def test_ping_where_nobody_is() -> None:
    """In time, and it says how far it went: no connection, or no answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        result = run("ping", f"127.0.0.1:{free.getsockname()[1]}", "--timeout", "0.5")
    assert result.exit_code == 1
    assert "no connection" in result.stderr
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        mute = context.socket(zmq.ROUTER)
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        result = run("ping", f"localhost:{port}", "--timeout", "3")
    finally:
        context.destroy(linger=0)
    assert result.exit_code == 1
    assert "did not answer" in result.stderr


def test_ping_keeps_to_allow_peers() -> None:
    """With a consumer's configuration it dials what that one would."""
    result = run("ping", "192.0.2.1:5000", "--config", "{}")
    assert result.exit_code == 1
    assert "allow_peers" in result.stderr


@pytest.mark.parametrize("peer", ["host", ":5000", "host:port", "host:70000", "::1:5000", ""])
def test_ping_of_no_peer(peer: str) -> None:
    """Status 2, with how to write it."""
    result = run("ping", peer)
    assert result.exit_code == 2
    assert repr(peer) in result.stderr


# ── top ──────────────────────────────────────────────────────────────────────


def test_top_shows_a_transfer(producer: Producer) -> None:
    """Peer, plane, bytes and outcome, at the agent that is named."""
    rows = np.zeros((100, 100), np.float16)
    with Consumer(factors=WHAT, planes=["zmq"], **SMALL) as consumer:
        consumer.fetch("a", producer.put("a", rows), timeout=PATIENCE)
        endpoint = endpoint_of(consumer)
        result = run("top", "--once", "--agent", endpoint)
        assert result.exit_code == 0
        for word in (str(consumer.agent_pid), "loopback", "delivered", "20.0 kB", "pool"):
            assert word in result.stdout
        result = run("top", "--once", "--json", "--agent", endpoint)
        (said,) = json.loads(result.stdout)
        assert said["transfers"][0]["outcome"] == "delivered"


@pytest.mark.usefixtures("alone")
def test_top_without_agents() -> None:
    """It says so, and an endpoint where nobody is is named."""
    result = run("top", "--once")
    assert result.exit_code == 1
    assert "no agent" in result.stderr
    result = run("top", "--agent", "ipc://@ec-connector-gone")
    assert result.exit_code == 1
    assert "ec-connector-gone" in result.stderr


def test_top_goes_on_until_the_agent_ends(producer: Producer) -> None:
    """A line of JSON for each look; the end of the one that was named is its end."""
    code = "import sys; from ec_connector.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["top", "--json", "--interval", "0.1", "--agent", endpoint_of(producer)]
    watching = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    with watching.stdout as lines:
        for _ in range(3):
            (said,) = json.loads(lines.readline())
            assert said["agent_pid"] == producer.agent_pid
        producer.close()
        assert watching.wait(PATIENCE) == 0


def test_an_agent_that_is_stopped_or_ends_is_said_to_be(producer: Producer) -> None:
    """Nobody waits for it for ever."""
    agent = Watched(endpoint_of(producer))
    assert agent.state().agent_pid == producer.agent_pid
    process = os.pidfd_open(producer.agent_pid)
    os.kill(producer.agent_pid, signal.SIGKILL)
    assert select.select([process], [], [], PATIENCE)[0]
    os.close(process)
    with pytest.raises(AgentLostError):
        agent.state()
    watched = [agent]
    assert states(watched) == []
    assert watched == []


def test_agents_are_found(producer: Producer) -> None:
    """By the kernel's list of sockets, in which other processes have names of all kinds."""
    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind(b"\0x\n\x0b\x85")
        odd.listen()
        assert endpoint_of(producer) in endpoints()


def test_screen() -> None:
    """Rates are between two looks; reasons are named; what clients chose is text."""
    sums = PeerSums("192.0.2.1:5", "consumer", "wan", "zmq", 2, 1, 3_000_000, 400, 0.5)
    transfer = Transfer(
        1, "item\x1b[31m", "192.0.2.1:5", "consumer", "wan", "zmq", "zstd", "delivered", 8,
        1, 2, 0, 2_000_000, {"waiting": 0.25, "packing": 0.001}, 1.5,
    )  # fmt: skip
    was = state(peers=[PeerSums("192.0.2.1:5", "consumer", "wan", "zmq", 1, 1, 1_000_000, 400)])
    now = state(
        values={"blocks": 16, "blocks_free": 4, "blocks_pinned": 3, "parked_now": 9},
        peers=[sums],
        transfers=[transfer],
        reasons={"fallback_items": {"deadline": 2}},
    )
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - recorded
    console.print(screen([now], {1: was}, 2.0))
    console.file.close()
    shown = console.export_text()
    for text in (
        "75 % of 16 blocks", "pinned 3", "waiting for saves 9", "1.0 MB",
        "fallback items: deadline 2", "250.00 ms", "1.00 ms", "1.5 s", "2.0 MB", "zstd",
    ):  # fmt: skip
        assert text in shown, text
    assert "\x1b" not in shown
