# SPDX-License-Identifier: Apache-2.0
"""An engine's hold on its agent: started, lost, started again, shared, refused."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ec_connector.agent import link as module
from ec_connector.agent.link import EngineLink, LinkDown, LinkEvent, LinkUp
from ec_connector.agent.process import AgentProcess
from ec_connector.config import AgentOptions, Settings
from ec_connector.errors import AgentLostError, AgentStartError
from ec_connector.pool.region import Region
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import AskStats, Stats

PATIENCE = 20.0
SMALL = {"pool_size": "8MiB"}


def make(identity: Identity | None = None, **settings: object) -> EngineLink:
    """A link with a small pool, where the pool is its own."""
    if "agent" not in settings:
        settings = {**SMALL, **settings}
    return EngineLink(Settings.parse(settings), identity or Identity(), "client")


@pytest.fixture
def link() -> Iterator[EngineLink]:
    """A link to an agent of its own, not started yet."""
    link = make()
    yield link
    link.close()


@pytest.fixture
def shared() -> Iterator[AgentProcess]:
    """An agent that nobody owns, of a known kind."""
    options = AgentOptions(
        settings=Settings.parse(SMALL), identity=Identity(factors={"model": "a"})
    )
    process = AgentProcess(options)
    yield process
    process.stop()


def until(wanted: Callable[[list[LinkEvent]], bool], link: EngineLink) -> list[LinkEvent]:
    """Events until they are what is wanted, or time is over."""
    events: list[LinkEvent] = []
    end = time.monotonic() + PATIENCE
    while not wanted(events) and time.monotonic() < end:
        events += link.wait(1.0)
    return events


def is_up_again(events: list[LinkEvent]) -> bool:
    """Whether another agent serves."""
    return bool(events) and isinstance(events[-1], LinkUp)


def kill(pid: int) -> None:
    """SIGKILL, and wait for the end without taking the exit status from its parent."""
    fd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(PATIENCE * 1000)
    os.close(fd)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_start_and_close(link: EngineLink) -> None:
    """The agent serves within seconds, and is gone when close returns."""
    assert (link.up, link.endpoint, link.agent_pid) == (False, "", 0)
    assert not link.send(AskStats())
    assert link.poll() == []
    welcome = link.start()
    assert (link.up, link.agent_pid) == (True, welcome.agent_pid)
    assert link.endpoint.startswith("ipc://@")
    assert link.send(AskStats(seq=4))
    (stats,) = link.wait(PATIENCE)
    assert isinstance(stats, Stats)
    link.close()
    link.close()
    assert not alive(welcome.agent_pid)
    assert (link.up, link.send(AskStats()), link.poll()) == (False, False, [])


def test_nothing_waits_unless_told(link: EngineLink) -> None:
    """An engine step polls, whether the agent is up or not."""
    pid = link.start().agent_pid
    for _ in range(2):
        begun = time.monotonic()
        for _ in range(200):
            link.poll()
            link.send(AskStats())
        assert time.monotonic() - begun < 2.0
        if alive(pid):
            kill(pid)


def test_killed_while_nobody_looks(link: EngineLink) -> None:
    """An idle engine's agent comes back without a call, and both changes are told later."""
    before = link.start()
    kill(before.agent_pid)
    end = time.monotonic() + PATIENCE
    while link._process is None or link._process.pid == before.agent_pid:
        assert time.monotonic() < end
        time.sleep(0.02)
    events = link.poll()
    assert [type(event) for event in events] == [LinkDown, LinkUp]
    down, up = events
    assert isinstance(down, LinkDown)
    assert f"pid {before.agent_pid}" in down.reason
    assert "-9" in down.reason
    assert isinstance(up, LinkUp)
    assert up.welcome.agent_pid == link.agent_pid
    assert up.welcome.region.token != before.region.token


def test_killed_again_and_again(link: EngineLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time another one serves, after a pause that grows."""
    monkeypatch.setattr(module, "FIRST_BACKOFF", 0.05)
    pauses: list[float] = []
    start_again = EngineLink._start_again

    def noted(self: EngineLink, backoff: float) -> AgentProcess | None:
        pauses.append(backoff)
        return start_again(self, backoff)

    monkeypatch.setattr(EngineLink, "_start_again", noted)
    link.start()
    for _ in range(3):
        kill(link.agent_pid)
        assert is_up_again(until(is_up_again, link))
        assert link.up
    assert pauses == [0.05, 0.1, 0.2]


def test_an_agent_that_lives_and_talks_no_more(link: EngineLink) -> None:
    """One whose connection is broken is ended, and another one serves."""
    before = link.start()
    assert link._client is not None
    assert link._client._channel is not None
    link._client._channel.ended = True
    events = until(is_up_again, link)
    assert [type(event) for event in events] == [LinkDown, LinkUp]
    assert not alive(before.agent_pid)
    assert link.send(AskStats())
    answered = until(lambda seen: any(isinstance(event, Stats) for event in seen), link)
    assert [type(event) for event in answered] == [Stats]


def test_rows_of_a_dead_agent_stay_readable(link: EngineLink) -> None:
    """The region is memory that the engine maps, too."""
    welcome = link.start()
    region = Region.open(welcome.region, writable=True)
    try:
        region.buffer[:4] = b"rows"
        kill(welcome.agent_pid)
        assert is_up_again(until(is_up_again, link))
        assert bytes(region.buffer[:4]) == b"rows"
    finally:
        region.close()


def test_starts_that_fail_are_tried_again(
    link: EngineLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For as long as it takes, one line each, with the reason."""
    monkeypatch.setattr(module, "FIRST_BACKOFF", 0.05)
    pid = link.start().agent_pid
    tries = 0

    def failing(options: AgentOptions) -> AgentProcess:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise (AgentStartError("no memory"), OSError("no more processes"))[tries - 1]
        return AgentProcess(options)

    monkeypatch.setattr(module, "AgentProcess", failing)
    kill(pid)
    assert is_up_again(until(is_up_again, link))
    assert tries == 3
    lines = [record.message for record in caplog.records if "next try" in record.message]
    assert len(lines) == 2
    assert "no memory" in lines[0]
    assert "no more processes" in lines[1]


def test_closed_while_starts_fail(link: EngineLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper ends, however long its next pause would be."""
    pid = link.start().agent_pid
    monkeypatch.setattr(module, "FIRST_BACKOFF", 60.0)
    kill(pid)
    until(lambda events: any(isinstance(event, LinkDown) for event in events), link)
    keeper = link._keeper
    assert keeper is not None
    begun = time.monotonic()
    link.close()
    assert time.monotonic() - begun < PATIENCE
    assert not keeper.is_alive()


def test_port_in_use() -> None:
    """The first start's error is the caller's, and nothing is left behind."""
    other = make()
    port = other.start().peer_port
    try:
        link = make(port=port)
        with pytest.raises(AgentStartError, match=str(port)):
            link.start()
        assert not link.up
        link.close()
    finally:
        other.close()


def test_shared_agent(shared: AgentProcess) -> None:
    """Used, not started, and not ended with the link."""
    one, two = make(agent=shared.endpoint), make(agent=shared.endpoint)
    for link in (one, two):
        assert link.start().agent_pid == shared.pid
    one.close()
    assert shared.alive()
    assert two.send(AskStats())
    assert isinstance(two.wait(PATIENCE)[0], Stats)
    two.close()


def test_end_of_a_shared_agent(shared: AgentProcess) -> None:
    """Told once; no other is started, and nothing hangs."""
    link = make(agent=shared.endpoint)
    try:
        link.start()
        kill(shared.pid)
        (down,) = until(bool, link)
        assert isinstance(down, LinkDown)
        assert "not started here" in down.reason
        assert (link.up, link.poll(), link.send(AskStats())) == (False, [], False)
    finally:
        link.close()


def test_shared_agent_of_another_kind(shared: AgentProcess) -> None:
    """Refused, naming the factor and both values."""
    link = make(Identity(factors={"model": "b"}), agent=shared.endpoint)
    with pytest.raises(AgentLostError, match=r"model differs: 'a'.*'b'"):
        link.start()
    link.close()
    assert shared.alive()


def test_no_shared_agent() -> None:
    """The endpoint is named."""
    link = make(agent="ipc://@ec-connector-nobody")
    with pytest.raises(AgentLostError, match="@ec-connector-nobody"):
        link.start()
    link.close()


# ── the process ──────────────────────────────────────────────────────────────


def options() -> AgentOptions:
    """Options of an agent that nobody owns."""
    return AgentOptions(settings=Settings.parse(SMALL), identity=Identity())


def test_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of any start that fails: an AgentStartError, with the command in it."""
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(AgentStartError, match=r"/no/such/python -P -m ec_connector\.agent"):
        AgentProcess(options())


def test_something_else_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start-up file of the site that prints is named as what it is."""
    (tmp_path / "sitecustomize.py").write_text("print('hello from the site')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(AgentStartError, match=r"hello from the site.*standard output"):
        AgentProcess(options())


def test_ends_before_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed at once, not at the end of the time that a start may take."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    begun = time.monotonic()
    with pytest.raises(AgentStartError, match="the agent ended with status 7"):
        AgentProcess(options())
    assert time.monotonic() - begun < PATIENCE


def test_stop_of_one_that_hangs() -> None:
    """SIGTERM cannot reach a stopped process; SIGKILL does."""
    process = AgentProcess(options())
    os.kill(process.pid, signal.SIGSTOP)
    process.stop(0.2)
    assert not process.alive()
    process.stop()
