# SPDX-License-Identifier: Apache-2.0
"""Memory, room, descriptors and addresses that run out or change hands."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.chaos.world import GRACE, MIB, Side, World, eventually, note

pytestmark = pytest.mark.chaos


def may_mount() -> bool:
    """Whether this user can have a mount namespace of its own."""
    words = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_a_pool_full_of_pins() -> None:
    """What finds no room says so at its deadline, and there is room as soon as somebody lets go."""
    with World() as world:
        note("fault: pool full of pins")
        held = [world.fetch(world.item(4 * MIB)) for _ in range(4)]
        assert [world.ended(key)["end"] for key in held] == ["ready"] * 4
        end = world.ended(world.fetch(world.item(4 * MIB), 1.0), 1.0 + GRACE)
        assert (end["end"], end["reason"]) == ("failed", "pool_full")
        waiting = world.fetch(world.item(4 * MIB))
        world.consumer.ask("release", held[:1])
        assert world.ended(waiting)["end"] == "ready"
        world.settle()


def test_an_item_larger_than_the_pool() -> None:
    """The producer does not announce it; a consumer that is told of one refuses it at once."""
    with World() as world:
        (refused,) = world.producer.ask("reserve", ["huge"], 17 * MIB)
        assert "the whole pool has" in refused["refused"]
        item = {**world.item(), "nbytes": 17 * MIB, "shape": [17 * MIB]}
        end = world.ended(world.fetch(item), GRACE)
        assert end["reason"] == "pool_full"
        world.settle()


def test_one_host_for_many_more_than_it_can_hold() -> None:
    """Without descriptors for more peers, fetches from those fail; what is connected works."""
    few = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
    sides = Side("producer"), Side("consumer", few)
    with World(sides) as world:
        note("fault: no descriptors left")
        assert world.transfer()["end"] == "ready"
        item = world.item()
        strangers = [
            {**item, "key": f"of {host}", "peer_host": f"127.1.0.{host}"} for host in range(1, 60)
        ]
        keys = [world.fetch(stranger) for stranger in strangers]
        reasons = {world.ended(key)["reason"] for key in keys}
        assert reasons <= {"peer_unreachable", "peer_refused"}
        assert "peer_refused" in reasons
        world.settle()


@pytest.mark.skipif(not may_mount(), reason="no mount namespace for this user")
def test_little_shared_memory() -> None:
    """A /dev/shm of 64 MiB, full: the pool is elsewhere."""
    script = "mount -t tmpfs -o size=64m tmpfs /dev/shm && head -c 64M /dev/zero >/dev/shm/full"
    full = ("unshare", "-m", "sh", "-c", f'{script}; exec "$@"', "sh")
    sides = Side("producer", full, pool_size=128 * MIB), Side("consumer", full)
    with World(sides) as world:
        note("fault: /dev/shm full")
        assert world.transfer()["end"] == "ready"
        world.settle()


def test_a_producer_comes_back_with_other_contents() -> None:
    """On the same port: what it had is missing, what has changed is refused, all at once."""
    with World() as world:
        port = world.producer.port
    sides = Side("producer", port=port), Side("consumer")
    with World(sides) as world:
        gone, other = world.item(), world.item()
        world.producer.restart()
        note("fault: producer restarted on its port")
        assert world.producer.port == port
        world.producer.put(other["key"], 2 * MIB)
        ends: list[dict[str, object]] = []

        def answered() -> bool:
            keys = [world.fetch(item) for item in (gone, other)]
            ends[:] = [world.ended(key) for key in keys]
            return all(end["reason"] != "peer_unreachable" for end in ends)

        eventually(answered, "the producer is not reached again")
        assert [end["reason"] for end in ends] == ["missing", "mismatch"]
        world.settle()


def test_a_consumer_that_is_stopped_holds_up_nobody() -> None:
    """One that reads nothing any more costs its producer a lease; another one is served."""
    with World() as world, World((world.producer, Side("consumer"))) as beside:
        note("fault: slow reader")
        key = world.fetch(world.item(8 * MIB))
        os.kill(world.consumer.agent, signal.SIGSTOP)
        for _ in range(5):
            assert beside.transfer()["end"] == "ready"
        os.kill(world.consumer.agent, signal.SIGCONT)
        world.ended(key)
        beside.settle()
        world.settle()
