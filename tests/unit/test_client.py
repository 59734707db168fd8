# SPDX-License-Identifier: Apache-2.0
"""The engine's side of the local connection, against an agent that says what the test wants."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ec_connector.agent.channel import Channel, accept, listen
from ec_connector.client import AgentClient
from ec_connector.errors import AgentLostError
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import (
    LOCAL_VERSION,
    AskStats,
    Fetch,
    FetchItem,
    Hello,
    Refused,
    Release,
    Reserve,
    ReserveItem,
    SaveFailed,
    Stats,
    ToClient,
    Welcome,
    decode_to_agent,
    encode_local,
)
from ec_connector.protocol.messages import RegionRef

PATIENCE = 10.0
WELCOME = Welcome("id", 1, RegionRef(1, 3, 4096, 4096, "00"))


class Script:
    """The agent's end of one connection, in the test's own thread."""

    def __init__(self) -> None:
        self.listener, self.endpoint = listen()
        self._channel: Channel | None = None

    @property
    def channel(self) -> Channel:
        """The connection, as soon as there is one."""
        if self._channel is None:
            wait(self.listener.fileno())
            self._channel = accept(self.listener)
            assert self._channel is not None
        return self._channel

    def say(self, *messages: ToClient) -> None:
        """Send messages to the client."""
        for message in messages:
            assert self.channel.send(encode_local(message))

    def heard(self, count: int) -> list[object]:
        """So many messages of the client's."""
        messages: list[object] = []
        while len(messages) < count:
            wait(self.channel.fd)
            frames = self.channel.receive()
            assert frames or not self.channel.ended
            messages += [decode_to_agent(frame) for frame in frames]
        return messages

    def close(self) -> None:
        """End both."""
        self.listener.close()
        if self._channel is not None:
            self._channel.close()


def wait(fd: int) -> None:
    """Until something can be read there."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(PATIENCE * 1000)


@pytest.fixture
def script() -> Iterator[Script]:
    """An agent that says nothing by itself."""
    script = Script()
    yield script
    script.close()


@pytest.fixture
def client(script: Script) -> Iterator[AgentClient]:
    """A client of it."""
    with AgentClient(script.endpoint, "scheduler", Identity("hash", {"model": "m"})) as client:
        yield client


def test_first_word(script: Script, client: AgentClient) -> None:
    """The client says who it is without being asked."""
    (hello,) = script.heard(1)
    assert isinstance(hello, Hello)
    assert (hello.role, hello.version) == ("scheduler", LOCAL_VERSION)
    assert (hello.compatibility_hash, hello.factors) == ("hash", {"model": "m"})


def test_welcome_between_others(script: Script, client: AgentClient) -> None:
    """What comes before and after it is kept, in order, for ``receive``."""
    script.say(Stats({}, 1), Stats({}, 2), WELCOME, Stats({}, 3))
    assert client.hello(PATIENCE) == WELCOME
    numbers: list[int] = []
    while len(numbers) < 3:
        numbers += [message.seq for message in client.receive(PATIENCE)]
    assert numbers == [1, 2, 3]


def test_refused(script: Script, client: AgentClient) -> None:
    """In the agent's words."""
    script.say(Refused("model differs"))
    with pytest.raises(AgentLostError, match=r"@ec-connector-.*refuses: model differs"):
        client.hello(PATIENCE)


def test_another_version(script: Script, client: AgentClient) -> None:
    """Both versions are named, and what to do."""
    script.say(Welcome("id", 1, WELCOME.region, version=LOCAL_VERSION + 1))
    words = rf"version {LOCAL_VERSION + 1}.*{LOCAL_VERSION}.*install the same"
    with pytest.raises(AgentLostError, match=words):
        client.hello(PATIENCE)


def test_no_answer(client: AgentClient) -> None:
    """Not longer than asked for."""
    begun = time.monotonic()
    with pytest.raises(AgentLostError, match=r"within 0\.2 s"):
        client.hello(0.2)
    assert time.monotonic() - begun < PATIENCE


def test_hangs_up_instead(script: Script, client: AgentClient) -> None:
    """Noticed at once, not at the end of the time."""
    script.channel.close()
    begun = time.monotonic()
    with pytest.raises(AgentLostError, match="no agent at"):
        client.hello(60.0)
    assert time.monotonic() - begun < PATIENCE


@pytest.mark.parametrize("frame", [b"\xc1", b"", b"\x81\xa4type\xa4what", b"\x93\x01\x02\x03"])
def test_an_agent_that_talks_nonsense(script: Script, client: AgentClient, frame: bytes) -> None:
    """It is given up in words; nothing is raised, and what came before is delivered."""
    script.say(Stats({}, 1))
    script.channel.send(frame)
    script.say(Stats({}, 2))
    messages: list[ToClient] = []
    until = time.monotonic() + PATIENCE
    while not client.ended and time.monotonic() < until:
        messages += client.receive(0.1)
    assert [message.seq for message in messages] == [1]
    assert client.receive() == []
    assert not client.send(AskStats())
    with pytest.raises(AgentLostError, match="cannot be understood"):
        client.hello(PATIENCE)


def test_receive_does_not_wait_unless_told(client: AgentClient) -> None:
    """An engine step calls it."""
    begun = time.monotonic()
    for _ in range(100):
        assert client.receive() == []
    assert time.monotonic() - begun < 1.0


def test_receive_waits_for_the_first(script: Script, client: AgentClient) -> None:
    """And returns with it, not at the end of the time."""
    timer = threading.Timer(0.1, script.say, [WELCOME])
    timer.start()
    begun = time.monotonic()
    assert client.receive(60.0) == [WELCOME]
    assert time.monotonic() - begun < PATIENCE
    timer.join()


def test_last_words_of_an_agent(script: Script, client: AgentClient) -> None:
    """What it sent before it ended is delivered."""
    script.say(Stats({}, 1))
    script.channel.close()
    assert [message.seq for message in client.receive(PATIENCE)] == [1]
    assert client.receive(PATIENCE) == []
    assert client.ended


@pytest.mark.parametrize(
    "message",
    [
        Release(["bro\ud800ken"]),
        Fetch([FetchItem("a", 1, peer_host="bro\udfffken")]),
        Fetch([FetchItem("a", 2**64)]),
        Fetch([FetchItem("a", 1, nbytes=2**70)]),
        Fetch([FetchItem("a", 1, peer_port=-(2**63) - 1)]),
        Reserve(1, 1, [ReserveItem("a", 1, "uint8", [2**65])]),
        SaveFailed("a", 1, "bro\ud800ken"),
    ],
)
def test_what_cannot_be_written(
    script: Script, client: AgentClient, message: Fetch | Release | Reserve | SaveFailed
) -> None:
    """False, and the connection is as it was: nothing raised, nothing half sent."""
    assert not client.send(message)
    assert client.send(AskStats(seq=5))
    hello, ask = script.heard(2)
    assert isinstance(hello, Hello)
    assert ask == AskStats(seq=5)


def test_factors_that_cannot_be_written(script: Script) -> None:
    """Even the first word may fail without raising; the agent then never answers."""
    with AgentClient(script.endpoint, "client", Identity(factors={"a": "\ud800"})) as client:
        with pytest.raises(AgentLostError, match="answered"):
            client.hello(0.1)
        assert client.send(AskStats())


def test_an_agent_that_does_not_read(script: Script, client: AgentClient) -> None:
    """Sending never waits; in the end it is refused, and what was taken arrives in order."""
    sent = 0
    key = "k" * 1_000_000
    begun = time.monotonic()
    while client.send(Release([key])):
        sent += 1
    assert time.monotonic() - begun < PATIENCE
    assert sent > 10
    read: list[object] = []
    reader = threading.Thread(target=lambda: read.extend(script.heard(1 + sent)))
    reader.start()
    until = time.monotonic() + PATIENCE
    while reader.is_alive() and time.monotonic() < until:
        client.receive(0.05)  # what is queued leaves while an answer is waited for
    reader.join(PATIENCE)
    assert len(read) == 1 + sent


def test_a_look_sends_what_is_queued(script: Script, client: AgentClient) -> None:
    """An engine that only polls must not keep to itself what the agent had no room for."""
    key = "k" * 1_000_000
    while client._channel is not None and not client._channel.unsent:
        assert client.send(Release([key]))
    read: list[object] = []
    reader = threading.Thread(target=lambda: read.extend(script.heard(2)))
    reader.start()
    until = time.monotonic() + PATIENCE
    while reader.is_alive() and time.monotonic() < until:
        client.receive()
    reader.join(PATIENCE)
    assert read[1] == Release([key])


def test_close_gives_last_words_a_moment(script: Script) -> None:
    """A release just before the end is not lost, if the agent reads."""
    client = AgentClient(script.endpoint, "client")
    key = "k" * 1_000_000
    assert client.send(Release([key]))
    read: list[object] = []
    reader = threading.Thread(target=lambda: read.extend(script.heard(2)))
    reader.start()
    client.close()
    reader.join(PATIENCE)
    assert read[1:] == [Release([key])]


def test_closing(script: Script) -> None:
    """Twice does no harm, and a closed client is one whose agent has gone."""
    client = AgentClient(script.endpoint, "client")
    client.close()
    client.close()
    assert client.ended
    assert not client.send(AskStats())
    assert client.receive(PATIENCE) == []


@pytest.mark.parametrize(
    "endpoint", ["ipc://@ec-connector-nobody", "ipc:///no/such/file", "tcp://127.0.0.1:1", "", "\0"]
)
def test_nobody_listens(endpoint: str) -> None:
    """Making the object never raises; asking for its agent does, in words."""
    client = AgentClient(endpoint, "client")
    assert client.ended
    with pytest.raises(AgentLostError, match="no agent at"):
        client.hello(PATIENCE)
    client.close()


def test_more_descriptors_than_select_knows(script: Script) -> None:
    """An engine may have thousands of them open."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 1100
    if hard < 2 * many:
        pytest.skip(f"this user may have {hard} descriptors open")
    opened: list[socket.socket] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * many), hard))
        opened.extend(socket.socket(socket.AF_UNIX) for _ in range(many))
        with AgentClient(script.endpoint, "client") as client:
            script.say(WELCOME)
            assert client.hello(PATIENCE) == WELCOME
    finally:
        for one in opened:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
