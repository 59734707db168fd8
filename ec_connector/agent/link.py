# SPDX-License-Identifier: Apache-2.0
"""An engine's hold on its agent: starts it, starts it again when it dies, and talks to it.

A thread sleeps on the agent process and starts the next one after a back-off, so
the agent of an idle engine comes back too. Everything else happens in calls of
the engine's own thread, and none of those waits unless told how long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import threading
import time
from dataclasses import dataclass

from msgspec import structs

from ec_connector.agent.life import LIFE, Life
from ec_connector.agent.process import AgentProcess
from ec_connector.client import AgentClient
from ec_connector.config import AgentOptions, Settings
from ec_connector.errors import AgentError, AgentLostError
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.local import ToAgent, ToClient, Welcome

logger = logging.getLogger("vllm.ec_connector.link")

FIRST_BACKOFF = 0.2
MAX_BACKOFF = 30.0
STEADY_SECONDS = 60.0
"""An agent that lived this long did not die of its start: the back-off begins anew."""
HELLO_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The agent is gone. What it had reserved or fetched is void."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Another agent serves, with an empty pool in another region."""

    welcome: Welcome


LinkEvent = ToClient | LinkDown | LinkUp


class EngineLink:
    """One engine's agent. All methods are for one thread, the engine's.

    Args:
        settings: the connector's settings; with ``settings.agent`` a running
            agent is used and none is started.
        identity: what this engine is to its peers.
        role: ``"scheduler"`` for an engine, ``"client"`` for anything else.
        serves: what a router may ask of this engine, see ``AgentOptions``.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        role: str = "scheduler",
        *,
        serves: tuple[str, ...] = (),
    ) -> None:
        self._options = AgentOptions(
            settings=settings, identity=identity, owner_pid=os.getpid(), serves=serves
        )
        self._role = role
        self._client: AgentClient | None = None
        self._serving: AgentProcess | None = None  # whose end self._client is
        self._arrivals: queue.SimpleQueue[_Successor | LinkDown] = queue.SimpleQueue()
        self._process: AgentProcess | None = None
        self._closing = threading.Event()
        self._life = LIFE.start
        self._handover = threading.Lock()  # over _life and _process
        self._lifeline = -1
        self._keeper: threading.Thread | None = None
        self.welcome: Welcome | None = None

    @property
    def up(self) -> bool:
        """Whether an agent serves, as far as is known."""
        return self._client is not None

    @property
    def endpoint(self) -> str:
        """Where the engine's other processes reach the agent; empty while there is none."""
        return self._client.endpoint if self._client is not None else ""

    @property
    def agent_pid(self) -> int:
        """The agent's process id; 0 while there is none."""
        return self.welcome.agent_pid if self.welcome is not None and self.up else 0

    def start(self) -> Welcome:
        """Start the agent and wait until it serves.

        Raises:
            AgentStartError: it did not come up.
            AgentLostError: it came up and does not answer, or is of another version.
        """
        if self._options.settings.agent:
            welcome = self._take(self._meet(self._options.settings.agent, None))
            with contextlib.suppress(OSError):
                self._lifeline = os.pidfd_open(welcome.agent_pid)
            self._happened("serves")
            return welcome
        self._process = AgentProcess(self._options)
        try:
            welcome = self._take(self._meet(self._process.endpoint, self._process))
        except AgentError:
            self._process.stop(0)
            raise
        self._happened("serves")
        self._keeper = threading.Thread(
            target=self._keep, args=(self._process,), name="ec-agent-keeper", daemon=True
        )
        self._keeper.start()
        return welcome

    def poll(self) -> list[LinkEvent]:
        """What has happened since the last call. Never waits."""
        return self._collect(0.0)

    def wait(self, timeout: float) -> list[LinkEvent]:
        """Like :meth:`poll`, but waits up to ``timeout`` seconds for something to happen."""
        return self._collect(timeout)

    def send(self, message: ToAgent) -> bool:
        """Queue a message for the agent. Never waits; False while there is none."""
        return self._client is not None and self._client.send(message)

    def identify(self, identity: Identity) -> None:
        """What this engine is from now on: for agents to come, the one that serves must be told."""
        self._options = structs.replace(self._options, identity=identity)

    def close(self) -> None:
        """End the agent, if this link started it. Idempotent."""
        # From here on the keeper hands nothing over, and ends what it is just starting.
        self._happened("closed")
        self._closing.set()
        self._part()
        if self._process is not None:
            self._process.stop()
        if self._keeper is not None:
            self._keeper.join(HELLO_SECONDS)
        while not self._arrivals.empty():
            arrival = self._arrivals.get()
            if isinstance(arrival, _Successor):
                arrival.client.close()

    # ── the engine's thread ──────────────────────────────────────────────────

    def _collect(self, timeout: float) -> list[LinkEvent]:
        events: list[LinkEvent] = []
        serving = False
        if self._client is not None:
            events += self._client.receive(timeout)
            serving = not self._client.ended
        if self._lifeline >= 0 and (_ended(self._lifeline) or not serving):
            pid = self.agent_pid
            self._part()
            self._happened("ended elsewhere")
            reason = f"the agent (pid {pid}) ended; it was not started here"
            logger.error("%s, so no other is", reason)
            events.append(LinkDown(reason))
        elif timeout > 0 and not serving and not events:
            # The keeper knows the agent's end a moment after its connection does.
            with contextlib.suppress(queue.Empty):
                events.append(self._follow(self._arrivals.get(timeout=timeout)))
        while not self._arrivals.empty():
            events.append(self._follow(self._arrivals.get()))
        if self._client is not None and self._client.ended and self._serving is not None:
            # As a rule it is dying anyway. One that lives and does not talk to its engine is
            # of no use; the keeper starts another.
            if self._serving.alive():
                logger.error("the connection to the agent (pid %d) broke: ended", self.agent_pid)
            self._serving.kill()
        return events

    def _follow(self, arrival: _Successor | LinkDown) -> LinkDown | LinkUp:
        self._part()
        return arrival if isinstance(arrival, LinkDown) else LinkUp(self._take(arrival))

    def _take(self, successor: _Successor) -> Welcome:
        self._client, self.welcome = successor.client, successor.welcome
        self._serving = successor.process
        return successor.welcome

    def _part(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    # ── both threads ─────────────────────────────────────────────────────────

    def _happened(self, event: str, successor: _Successor | None = None) -> bool:
        """Note what became of the agent; False once the link is closed."""
        with self._handover:
            if self._life is Life.CLOSED:
                return False
            self._life = LIFE.after(self._life, event, f"of process {os.getpid()}")
            if successor is not None:
                self._process = successor.process
                self._arrivals.put(successor)
        return True

    # ── the keeper's thread ──────────────────────────────────────────────────

    def _keep(self, process: AgentProcess) -> None:
        backoff = FIRST_BACKOFF
        started = time.monotonic()
        while True:
            status = process.wait()
            if not self._happened("ended"):
                return
            process.stop(0)
            reason = f"the agent (pid {process.pid}) ended with status {status}"
            logger.error("%s; starting another", reason)
            self._arrivals.put(LinkDown(reason))
            if time.monotonic() - started > STEADY_SECONDS:
                backoff = FIRST_BACKOFF
            successor = self._start_again(backoff)
            if successor is None:
                return
            process, started = successor, time.monotonic()
            backoff = min(backoff * 2, MAX_BACKOFF)
            logger.warning("another agent serves (pid %d)", process.pid)

    def _start_again(self, backoff: float) -> AgentProcess | None:
        """Try until an agent serves and answers; None when the link closes first."""
        while not self._closing.wait(backoff):
            process: AgentProcess | None = None
            try:
                process = AgentProcess(self._options)
                # Here, not in the engine's thread: that one must not wait for an answer.
                successor = self._meet(process.endpoint, process)
            except (AgentError, OSError) as error:
                if process is not None:
                    process.stop(0)
                backoff = min(backoff * 2, MAX_BACKOFF)
                logger.error("no agent, next try in %.1f s: %s", backoff, error)
                self._happened("start failed")
                continue
            if self._happened("serves", successor):
                return process
            successor.client.close()
            process.stop()
        return None

    def _meet(self, endpoint: str, process: AgentProcess | None) -> _Successor:
        client = AgentClient(endpoint, self._role, self._options.identity)
        try:
            return _Successor(client, client.hello(HELLO_SECONDS), process)
        except AgentLostError:
            client.close()
            raise


@dataclass(frozen=True, slots=True)
class _Successor:
    client: AgentClient
    welcome: Welcome
    process: AgentProcess | None


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
