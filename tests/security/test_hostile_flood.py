# SPDX-License-Identifier: Apache-2.0
"""One peer asks as fast as it can, and reads nothing; another one fetches all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ec_connector import Consumer
from ec_connector.protocol.messages import XferCredit, XferDone, XferReq, encode
from ec_connector.protocol.producer import MAX_GRANTS_OF_PEER
from ec_connector.testing import FakeProducer
from tests.security.hostile import (
    PATIENCE,
    ROWS,
    SMALL,
    RawConsumer,
    Victim,
    attempt,
    frame,
    request,
    shaken,
    sockets,
    until,
)

FETCHES = 10
IN_TIME = 5.0
KEPT = 96 * 1024
"""KiB: what an agent's heap keeps for the next time, and what waits for one that does not read."""


@pytest.fixture
def producer() -> Iterator[FakeProducer]:
    """Its pool holds what the flood asks for."""
    with FakeProducer(lease="1s", max_parked=500, **SMALL) as producer:
        producer.put("held", ROWS)
        producer.announce("parked", ROWS)
        yield producer


@pytest.fixture
def honest(producer: FakeProducer) -> Iterator[Consumer]:
    """The other peer."""
    with Consumer(planes=["zmq"], **SMALL) as consumer:
        assert (consumer.fetch("warm", producer.put("warm", ROWS), timeout=PATIENCE) == ROWS).all()
        yield consumer


FLOODS: dict[str, Callable[[int], bytes]] = {
    "what is not here": lambda n: encode(request(f"absent {n}")),
    "what is here, in sessions": lambda n: encode(request("held", f"session {n}")),
    "what is here, shown": lambda n: encode(request("held", f"session {n}", planes=["memory"])),
    "what is here, whole": lambda n: encode(XferReq("held", "", f"session {n}")),
    "what is to come": lambda n: encode(request("parked", f"session {n}", timeout_ms=2000)),
    "of another kind": lambda n: encode(request("held", f"s {n}", connector_version=n)),
    "credit and done": lambda n: (
        encode(XferCredit("nobody's", "held", n, 1 << 40))
        if n % 2
        else encode(XferDone("nobody's", "held", n))
    ),
    "noise": lambda n: b"\xc1" * (n % 100),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_starves_nobody(
    producer: FakeProducer,
    honest: Consumer,
    flood: Callable[[int], bytes],
    request: pytest.FixtureRequest,
) -> None:
    """All fetches of the other peer end in time, and the agent keeps within its bounds."""
    victim = Victim(producer)
    blob = b"".join(frame(b"", more=True) + frame(flood(n)) for n in range(5000))
    ending = threading.Event()
    sent = [0]

    def pour() -> None:
        while not ending.is_set():
            try:
                connection.sendall(blob)
            except OSError:
                return  # hung up below
            sent[0] += 5000

    connection = shaken(victim.port)
    pours = threading.Thread(target=pour)
    pours.start()
    slowest = 0.0
    try:
        for number in range(FETCHES):
            rows = ROWS + np.uint32(number)
            announcement = producer.put(f"honest {number}", rows)
            begun = time.monotonic()
            again = honest.fetch(f"honest {number}", announcement, timeout=IN_TIME)
            slowest = max(slowest, time.monotonic() - begun)
            assert (again == rows).all()
            time.sleep(0.05)
        heard = victim.stats()
        peak = victim.memory() - victim.begun_with
    finally:
        ending.set()
        connection.shutdown(2)
        connection.close()
        pours.join()
    attempt("requests of a flood", times=heard.get("requests", 0) + heard["frames_dropped"])
    print(
        f"{request.node.name}: slowest fetch {slowest * 1000:.0f} ms, {heard.get('requests', 0)} "
        f"requests, {heard['frames_dropped']} dropped, grown by {peak} KiB at most"
    )
    assert heard["grants"] <= MAX_GRANTS_OF_PEER + 1
    assert heard["parked_now"] <= 500
    victim.assert_whole(KEPT)


def test_one_peer_holds_so_much(producer: FakeProducer, honest: Consumer) -> None:
    """Under ever new sessions too; another peer is granted what it asks for meanwhile."""
    victim = Victim(producer)
    with sockets() as context:
        peer = RawConsumer(context, victim.port)
        asked = MAX_GRANTS_OF_PEER + 50
        for number in range(asked):
            peer.say(request("held", f"session {number}", planes=["memory"]))
        statuses = [peer.answer()[0].status for _ in range(asked)]
        assert statuses.count(0) == MAX_GRANTS_OF_PEER
        assert victim.stats()["grants"] == MAX_GRANTS_OF_PEER
        assert (honest.fetch("held", producer.put("held", ROWS), timeout=PATIENCE) == ROWS).all()
        attempt("grants beyond a peer's share", times=50)
    assert until(lambda: victim.stats()["grants"] == 0), "its lease has no end"
    victim.assert_whole(KEPT)
