# SPDX-License-Identifier: Apache-2.0
"""A process is killed, or stopped for a while, at each stage of a transfer.

Whatever happens, the request ends before its deadline in one of three ways, with the right
bytes or none; both pools are whole again; and the next transfer works.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.chaos.relay import DOWN, UP
from tests.chaos.world import GRACE, MIB, SOON, World, eventually

pytestmark = pytest.mark.chaos

SIZE = 4 * MIB


def asked(world: World) -> str:
    """The question is on its way."""
    item = world.item(SIZE)
    world.relay.hold(UP)
    return world.fetch(item)


def parked(world: World) -> str:
    """The producer has the question, and not yet the item."""
    item = world.through_relay(world.producer.ask("reserve", ["late"], SIZE)[0])
    key = world.fetch(item)
    eventually(lambda: world.producer.stats()["parked_now"] == 1, "nothing is parked")
    return key


def granted(world: World) -> str:
    """The item is pinned at the producer; nothing of the answer has arrived."""
    item = world.item(SIZE)
    world.relay.hold(DOWN)
    key = world.fetch(item)
    eventually(lambda: world.producer.stats()["grants"] == 1, "nothing is granted")
    return key


def half(world: World) -> str:
    """Half of the bytes have passed."""
    item = world.item(SIZE)
    world.relay.hold(DOWN, after=SIZE // 2)
    return world.fetch_part(item, SIZE // 4)


def unthanked(world: World) -> str:
    """All bytes have arrived; the producer does not know."""
    key = granted(world)
    world.relay.hold(UP)
    world.relay.let_pass(DOWN)
    assert world.ended(key)["end"] == "ready"
    return key


def delivered(world: World) -> str:
    """The consumer's engine has it, and has not let go of it."""
    key = world.fetch(world.item(SIZE))
    assert world.ended(key)["end"] == "ready"
    return key


STAGES = [asked, parked, granted, half, unthanked, delivered]
PLANES = [(stage, plane) for plane in ("zmq", "memory") for stage in STAGES]
PLANES.remove((half, "memory"))  # a copy, a thousandth of a second long
VICTIMS = [(side, whom) for side in ("producer", "consumer") for whom in ("agent", "owner")]


@pytest.mark.parametrize(("stage", "plane"), PLANES, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize(("side", "whom"), VICTIMS, ids=lambda part: part)
def test_killed(stage: Callable[[World], str], plane: str, side: str, whom: str) -> None:
    """SIGKILL: nothing is said, nothing is tidied up."""
    with World(planes=[plane]) as world:
        assert world.transfer()["end"] == "ready"
        key = stage(world)
        world.strike(side, whom, signal.SIGKILL)
        world.relay.let_pass()
        if (side, whom) != ("consumer", "owner"):
            world.ended(key)
        world.recover(world.producer if side == "producer" else world.consumer, whom)
        world.settle()


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
@pytest.mark.parametrize(("side", "whom"), VICTIMS, ids=lambda part: part)
def test_stopped_for_a_while(stage: Callable[[World], str], side: str, whom: str) -> None:
    """SIGSTOP, then SIGCONT: it goes on where it was, with clocks that have gone on without it."""
    with World() as world:
        assert world.transfer()["end"] == "ready"
        key = stage(world)
        world.strike(side, whom, signal.SIGSTOP)
        world.relay.let_pass()
        time.sleep(1.0)
        world.strike(side, whom, signal.SIGCONT)
        if stage is parked:
            world.producer.ask("save", ["late"], SIZE)
        assert world.ended(key)["end"] == "ready"
        world.settle()


def test_producer_stopped_for_longer_than_anybody_waits() -> None:
    """What was asked has ended when it goes on, and nothing of it is left."""
    with World() as world:
        assert world.transfer()["end"] == "ready"
        item = world.item(SIZE)
        world.strike("producer", "agent", signal.SIGSTOP)
        assert world.ended(world.fetch(item, SOON), SOON + GRACE)["end"] == "failed"
        world.strike("producer", "agent", signal.SIGCONT)
        world.settle()


def test_consumer_stopped_for_longer_than_anybody_waits() -> None:
    """Its deadline has passed when it goes on: the answer is late, and it is one."""
    with World() as world:
        assert world.transfer()["end"] == "ready"
        item = world.item(SIZE)
        world.relay.hold(UP)
        key = world.fetch(item, SOON)
        world.strike("consumer", "agent", signal.SIGSTOP)
        world.relay.let_pass()
        time.sleep(SOON + 1.0)
        world.strike("consumer", "agent", signal.SIGCONT)
        world.ended(key, GRACE)
        world.settle()
