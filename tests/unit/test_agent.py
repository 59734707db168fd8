# SPDX-License-Identifier: Apache-2.0
"""The agent as a process: starting, ending, being killed, being shared."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ec_connector import Consumer
from ec_connector.agent.channel import connect
from ec_connector.agent.link import EngineLink, LinkDown, LinkUp
from ec_connector.agent.process import AgentProcess
from ec_connector.client import AgentClient
from ec_connector.config import AgentOptions, Settings
from ec_connector.errors import AgentLostError, AgentStartError
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import (
    AskStats,
    DropAll,
    Fetch,
    FetchItem,
    Ready,
    Refused,
    Release,
    Stats,
    decode_to_client,
    encode_local,
)
from ec_connector.testing import FakeProducer

SMALL = {"pool_size": "8MiB"}
PATIENCE = 15.0


def ended(pidfd: int, seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def options(**settings: object) -> AgentOptions:
    """Options of an agent that nobody owns."""
    return AgentOptions(settings=Settings.parse({**SMALL, **settings}), identity=Identity())


def test_port_taken() -> None:
    """The start fails in seconds, and the text names the port and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        begun = time.monotonic()
        with pytest.raises(AgentStartError, match=rf"127\.0\.0\.1:{port}.*in use.*another port"):
            AgentProcess(options(port=port))
        assert time.monotonic() - begun < PATIENCE


def test_address_of_another_host() -> None:
    """An address that this host lacks is named."""
    with pytest.raises(AgentStartError, match=r"192\.0\.2\.7.*bind_host"):
        AgentProcess(options(bind_host="192.0.2.7"))


def test_two_with_the_same_settings() -> None:
    """Free ports are bound and announced, so nothing clashes."""
    with FakeProducer(**SMALL) as one, FakeProducer(**SMALL) as two:
        assert one.address != two.address


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ends_with_its_owner(number: signal.Signals) -> None:
    """However the owner dies, the agent is gone within two seconds and its names with it."""
    code = """
import signal, time
from ec_connector import Producer
signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored where tests run
producer = Producer(pool_size="8MiB")
print(producer.agent_pid, flush=True)
time.sleep(60)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    agent = os.pidfd_open(int(owner.stdout.readline()))
    try:
        owner.send_signal(number)
        owner.wait(PATIENCE)
        assert ended(agent, 2.0)
    finally:
        owner.stdout.close()
        os.close(agent)


def test_killed_agent_is_replaced() -> None:
    """The link says so, starts another one, and the pair works again."""
    with FakeProducer(**SMALL) as producer, Consumer(**SMALL) as consumer:
        first = producer.agent_pid
        producer.kill()
        producer.recover()
        assert producer.agent_pid != first
        rows = np.arange(5)
        assert (consumer.fetch("a", producer.put("a", rows)) == rows).all()


def test_link_tells_of_both() -> None:
    """First that the agent is down, then that another one is up, with another pool."""
    link = EngineLink(Settings.parse(SMALL), Identity(), "client")
    try:
        before = link.start()
        os.kill(before.agent_pid, signal.SIGKILL)
        events = []
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not any(isinstance(e, LinkUp) for e in events):
            events += link.wait(1.0)
        assert [type(event) for event in events] == [LinkDown, LinkUp]
        assert link.welcome is not None
        assert link.welcome.region.token != before.region.token
    finally:
        link.close()


def test_closed_while_it_comes_back() -> None:
    """Closing in the middle of a restart leaves no agent behind."""
    link = EngineLink(Settings.parse(SMALL), Identity(), "client")
    os.kill(link.start().agent_pid, signal.SIGKILL)
    time.sleep(0.3)
    link.close()
    link.close()
    assert not [child for child in children() if "ec_connector.agent" in child]


def children() -> list[str]:
    """Command lines of this process's live children."""
    found = []
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found


def test_shared_agent() -> None:
    """Engines of one kind share an agent; one of another kind is refused, naming the factor."""
    process = AgentProcess(options())
    try:
        with AgentClient(process.endpoint, "client", Identity(factors={"model": "a"})) as one:
            one.hello(PATIENCE)
            two = AgentClient(process.endpoint, "client", Identity(factors={"model": "b"}))
            with two, pytest.raises(AgentLostError, match=r"model differs: 'a'.*'b'"):
                two.hello(PATIENCE)
            assert one.send(AskStats(seq=3))
            (answer,) = one.receive(PATIENCE)
            assert isinstance(answer, Stats)
            assert answer.values["clients"] == 1
    finally:
        process.stop()


def test_garbage_from_a_client() -> None:
    """What is no message is refused in words; what is no frame ends that connection alone."""
    process = AgentProcess(options())
    try:
        with AgentClient(process.endpoint, "client") as good:
            good.hello(PATIENCE)
            bad = connect(process.endpoint)
            assert bad.send(b"\xc1garbage")
            poll = select.poll()
            poll.register(bad.fd, select.POLLIN)
            assert poll.poll(PATIENCE * 1000)
            assert b"undecodable" in bad.receive()[0]
            bad._socket.send(b"\xff\xff\xff\xff")
            assert poll.poll(PATIENCE * 1000)
            bad.receive()
            assert bad.ended
            bad.close()
            assert good.send(AskStats(seq=1))
            assert isinstance(good.receive(PATIENCE)[0], Stats)
    finally:
        process.stop()


def test_before_hello() -> None:
    """Who did not say who he is gets nothing done."""
    process = AgentProcess(options())
    try:
        with AgentClient(process.endpoint, "client", Identity()) as client:
            client.hello(PATIENCE)
        stranger = connect(process.endpoint)
        stranger.send(encode_local(Release(["a"])))
        poll = select.poll()
        poll.register(stranger.fd, select.POLLIN)
        assert poll.poll(PATIENCE * 1000)
        answer = decode_to_client(stranger.receive()[0])
        assert isinstance(answer, Refused)
        assert "before Hello" in answer.message
        stranger.close()
    finally:
        process.stop()


def test_client_that_ends_in_the_middle_of_its_wishes() -> None:
    """None of them stays pinned or under way, also those that come after its end is noticed."""
    process = AgentProcess(options())
    try:
        with FakeProducer(agent=process.endpoint) as producer:
            for key in "abc":
                producer.put(key, np.ones(10))
            doomed = AgentClient(process.endpoint, "client")
            doomed.hello(PATIENCE)
            os.kill(process.pid, signal.SIGSTOP)
            away = FetchItem("d", 60_000, "127.0.0.1", 1, 8, "uint8", [8])
            doomed.send(Fetch([*(FetchItem(key, 60_000) for key in "abc"), away]))
            doomed.close()
            os.kill(process.pid, signal.SIGCONT)
            values = stats(process)
            while values["clients"] > 2:  # the producer's and that of the statistics
                time.sleep(0.01)
                values = stats(process)
            assert (values["blocks_pinned"], values["fetching"]) == (0, 0)
    finally:
        process.stop()


@pytest.mark.parametrize("milliseconds", [2**31, 2**33, 2**62])
def test_the_longest_patience(milliseconds: int) -> None:
    """A deadline beyond what a poll can wait for does not end the agent."""
    process = AgentProcess(options())
    try:
        with (
            FakeProducer(agent=process.endpoint) as producer,
            AgentClient(process.endpoint, "client") as client,
        ):
            client.hello(PATIENCE)
            producer.announce("slow", np.ones(10))
            client.send(Fetch([FetchItem("slow", milliseconds)]))
            assert stats(process)["fetching"] == 1
            producer.land("slow")
            (answer,) = client.receive(PATIENCE)
            assert isinstance(answer, Ready)
    finally:
        process.stop()


def test_weights_of_one_client_changed() -> None:
    """Everything is dropped, and of the others those stay that do not contradict it."""
    process = AgentProcess(options())
    known = Identity(factors={"weights": "first"})
    try:
        with (
            AgentClient(process.endpoint, "scheduler", known) as one,
            AgentClient(process.endpoint, "scheduler", known) as other,
            AgentClient(process.endpoint, "worker") as worker,
            FakeProducer(agent=process.endpoint) as producer,
        ):
            for client in (one, other, worker):
                client.hello(PATIENCE)
            producer.put("a", np.ones(10))
            one.send(DropAll({"weights_version": "version 7"}))
            (refusal,) = other.receive(PATIENCE)
            assert isinstance(refusal, Refused)
            assert "weights_version differs: 'version 7' at the agent" in refusal.message
            assert other.receive(PATIENCE) == []
            assert other.ended
            one.send(DropAll({"weights_version": "version 8"}))
            assert stats(process)["entries"] == 0
            for client in (one, worker):
                client.send(AskStats())
                assert isinstance(client.receive(PATIENCE)[0], Stats)
        with (
            AgentClient(process.endpoint, "scheduler", known) as late,
            pytest.raises(AgentLostError, match="weights_version differs"),
        ):
            late.hello(PATIENCE)
    finally:
        process.stop()


def stats(process: AgentProcess) -> dict[str, int]:
    """What an agent counts, asked by a client of its own."""
    with AgentClient(process.endpoint, "client") as client:
        client.hello(PATIENCE)
        client.send(AskStats())
        (answer,) = client.receive(PATIENCE)
        assert isinstance(answer, Stats)
        return answer.values


def test_factors_of_too_many_kinds() -> None:
    """A client whose factors no longer fit into a request is refused, naming the limit."""
    process = AgentProcess(options())
    try:
        for number, fits in enumerate((True, False)):
            factors = {f"factor {number}.{one}": "x" for one in range(20)}
            with AgentClient(process.endpoint, "client", Identity(factors=factors)) as client:
                if fits:
                    client.hello(PATIENCE)
                else:
                    with pytest.raises(AgentLostError, match="40 factors are too many"):
                        client.hello(PATIENCE)
    finally:
        process.stop()


def test_nobody_there() -> None:
    """A wrong endpoint is an error of words, and sending to it does not raise."""
    client = AgentClient("ipc://@ec-connector-nobody", "client")
    assert not client.send(AskStats(seq=1))
    assert client.receive(5.0) == []
    with pytest.raises(AgentLostError, match="nobody"):
        client.hello(PATIENCE)
    client.close()


def test_what_cannot_be_written_is_not_sent() -> None:
    """Half a surrogate pair neither raises nor ends the connection."""
    process = AgentProcess(options())
    try:
        with AgentClient(process.endpoint, "client") as client:
            client.hello(PATIENCE)
            assert not client.send(Release(["\ud800"]))
            assert client.send(AskStats(seq=1))
            assert isinstance(client.receive(PATIENCE)[0], Stats)
    finally:
        process.stop()
