# SPDX-License-Identifier: Apache-2.0
"""Networks that break, swallow, lose and delay: by a relay, and between two hosts by a cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.chaos.relay import DOWN, UP
from tests.chaos.world import GRACE, MIB, SOON, Side, World, note

pytestmark = pytest.mark.chaos

HOSTS = {"ec-chaos-a": "10.98.0.1", "ec-chaos-b": "10.98.0.2"}
A, B = HOSTS
MISSING = [tool for tool in ("ip", "tc", "iptables") if shutil.which(tool) is None]
two_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or bool(MISSING),
    reason=f"network namespaces need root, ip, tc and iptables; missing: {MISSING or 'root'}",
)


# ── by a relay ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ways", [(UP,), (DOWN,), (UP, DOWN)], ids="+".join)
def test_swallowed(ways: tuple[str, ...]) -> None:
    """Connections stay open and nothing comes: the fetch ends at its deadline, the rest works."""
    with World() as world:
        assert world.transfer()["end"] == "ready"
        world.relay.hold(*ways)
        note("fault: black hole")
        end = world.ended(world.fetch(world.item(), 1.0), 1.0 + GRACE)
        assert end["reason"] in ("deadline", "peer_unreachable")
        world.settle()


def test_broken_in_the_middle() -> None:
    """The connection breaks with half of the bytes in, and is back in time: nobody notices."""
    with World() as world:
        assert world.transfer()["end"] == "ready"
        item = world.item(4 * MIB)
        world.relay.hold(DOWN, after=2 * MIB)
        key = world.fetch_part(item, MIB, 10.0)
        world.relay.cut()
        note("fault: broken connection")
        time.sleep(0.3)  # so long it is broken
        world.relay.let_pass()
        world.relay.mend()
        assert world.ended(key, 10.0 + GRACE)["end"] == "ready"
        world.settle()


def test_broken_for_good() -> None:
    """Nobody is there any more: what is asked ends after ``connect_timeout``, not the deadline."""
    with World() as world:
        assert world.transfer()["end"] == "ready"
        item = world.item()
        world.relay.cut()
        note("fault: broken connection")
        end = world.ended(world.fetch(item, 20.0), 1.0 + GRACE)
        assert end["reason"] == "peer_unreachable"
        world.settle()


def test_far_away() -> None:
    """200 ms each way: slower, and nothing else."""
    with World() as world:
        world.relay.delay = 0.2
        note("fault: 200 ms of delay")
        for _ in range(3):
            assert world.transfer(4 * MIB, 10.0)["end"] == "ready"
        world.settle()


# ── by a cable ───────────────────────────────────────────────────────────────


def run(*words: str) -> None:
    """Run a command of the system."""
    subprocess.run(words, check=True, capture_output=True, text=True)


class Cable:
    """Two hosts and what is between them."""

    def lose(self, share: float) -> None:
        """Drop this share of all packets, both ways."""
        note(f"fault: {share:.0%} of packets lost")
        random = ["-m", "statistic", "--mode", "random", "--probability", str(share)]
        for name in HOSTS:
            rule = ["-A", "INPUT", "-i", "ec0", *(random if share < 1 else []), "-j", "DROP"]
            run("ip", "netns", "exec", name, "iptables", *rule)

    def heal(self) -> None:
        """Lose nothing."""
        for name in HOSTS:
            run("ip", "netns", "exec", name, "iptables", "-F")

    def limit(self, rate: str) -> None:
        """So many bits a second, each way."""
        for name in HOSTS:
            tbf = ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
            run("tc", "-n", name, "qdisc", "replace", "dev", "ec0", "root", *tbf)


@pytest.fixture
def cable() -> Iterator[Cable]:
    """Two network namespaces and a veth pair."""
    try:
        for name in HOSTS:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "link", "add", "ec0", "netns", A, "type", "veth", "peer", "ec0", "netns", B)
        for name, address in HOSTS.items():
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "ec0")
            run("ip", "-n", name, "link", "set", "ec0", "up")
        yield Cable()
    finally:
        for name in HOSTS:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", name)


def across(inside: tuple[str, ...] = (), **settings: object) -> World:
    """A producer on one host and a consumer on the other; ``inside``: a command to run that one."""
    on = {name: ("ip", "netns", "exec", name) for name in HOSTS}
    producer = Side("producer", on[A], bind_host=HOSTS[A], **settings)
    consumer = Side("consumer", (*on[B], *inside), allow_peers=["10.98.0.0/24"], **settings)
    return World((producer, consumer))


@two_hosts
def test_two_hosts_share_no_memory(cable: Cable) -> None:
    """With both planes on it is tried, refused, and the bytes come through sockets.

    Namespaces of the network alone share processes, and so memory; hosts do not.
    """
    with across(("unshare", "--pid", "--fork", "--mount-proc"), planes=["memory", "zmq"]) as world:
        assert [world.transfer()["plane"] for _ in range(3)] == ["zmq"] * 3
        world.settle()


@two_hosts
@pytest.mark.parametrize("share", [0.01, 0.1])
def test_packets_are_lost(cable: Cable, share: float) -> None:
    """What arrives is right, and nothing waits beyond its deadline."""
    with across() as world:
        cable.lose(share)
        ends = [world.transfer(MIB, 10.0) for _ in range(10)]
        if share < 0.1:
            assert [end["end"] for end in ends] == ["ready"] * 10
        cable.heal()
        world.settle()


@two_hosts
def test_partition_in_the_middle(cable: Cable) -> None:
    """For longer than the deadline: the fetch fails; healed, all is as before."""
    with across() as world:
        assert world.transfer()["end"] == "ready"
        cable.limit("20mbit")
        key = world.fetch_part(world.item(8 * MIB), MIB, SOON)
        cable.lose(1.0)
        assert world.ended(key, SOON + GRACE)["end"] == "failed"
        cable.heal()
        cable.limit("1gbit")
        world.settle()


@two_hosts
def test_partition_that_heals_in_time(cable: Cable) -> None:
    """TCP sends again what was lost; the fetch is late, and right."""
    with across() as world:
        assert world.transfer()["end"] == "ready"
        cable.limit("40mbit")
        key = world.fetch_part(world.item(4 * MIB), MIB, 20.0)
        cable.lose(1.0)
        time.sleep(1.0)  # so long they are apart
        cable.heal()
        assert world.ended(key, 20.0 + GRACE)["end"] == "ready"
        world.settle()


@two_hosts
def test_half_open(cable: Cable) -> None:
    """The producer's host vanishes without a word: a fetch ends in time, its grant by its lease."""
    with across() as world:
        assert world.transfer()["end"] == "ready"
        item = world.item()
        cable.lose(1.0)
        assert world.ended(world.fetch(item, SOON), SOON + GRACE)["end"] == "failed"
        cable.heal()
        world.settle()
