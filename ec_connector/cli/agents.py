# SPDX-License-Identifier: Apache-2.0
"""The agents of this user on this host: found by their sockets, and asked what they do."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from ec_connector.agent.channel import NAME_PREFIX
from ec_connector.client import AgentClient
from ec_connector.errors import AgentLostError
from ec_connector.protocol.local import AskState, Refused, State

ANSWER_SECONDS = 5.0
"""An agent answers in milliseconds; one that is stopped never does."""


class Watched:
    """An agent that answered once. Each :meth:`state` brings the transfers since the last one.

    Raises:
        AgentLostError: nobody listens there, or no agent of this version and user does.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._client = AgentClient(endpoint, "client")
        try:
            self._client.hello(ANSWER_SECONDS)
        except AgentLostError:
            self._client.close()
            raise
        self._seen = 0

    def state(self) -> State:
        """What it says now. Raises AgentLostError when it ended, or says nothing for 5 s."""
        self._client.send(AskState(self._seen))
        until = time.monotonic() + ANSWER_SECONDS
        while (left := until - time.monotonic()) > 0 and not self._client.ended:
            for message in self._client.receive(left):
                if isinstance(message, Refused):
                    raise AgentLostError(f"the agent at {self.endpoint}: {message.message}")
                if isinstance(message, State):
                    if message.transfers:
                        self._seen = message.transfers[-1].number
                    return message
        raise AgentLostError(f"the agent at {self.endpoint} ended, or does not answer")

    def close(self) -> None:
        """Leave it."""
        self._client.close()


def endpoints() -> list[str]:
    """Where agents listen on this host, those of other users included."""
    try:
        rows = Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]
    except OSError:
        return []
    names = {words[-1] for row in rows if (words := row.split())}
    return sorted(f"ipc://{name}" for name in names if name.startswith(NAME_PREFIX))


def watch(endpoint: str = "", known: Collection[str] = ()) -> list[Watched]:
    """The agent at ``endpoint``, or all but the ``known`` ones that let this process in.

    Raises:
        AgentLostError: none answers at the endpoint that was named.
    """
    if endpoint:
        return [Watched(endpoint)]
    found = []
    for name in endpoints():
        if name in known:
            continue
        try:
            found.append(Watched(name))
        except AgentLostError:  # another user's, or it has ended since
            continue
    return found


def states(watched: list[Watched]) -> list[State]:
    """What each says; those that ended are dropped from the list."""
    said = []
    for agent in list(watched):
        try:
            said.append(agent.state())
        except AgentLostError:
            agent.close()
            watched.remove(agent)
    return said


def look(endpoint: str = "") -> list[State]:
    """What those that :func:`watch` finds say, once. Raises as that does."""
    watched = watch(endpoint)
    try:
        return states(watched)
    finally:
        for agent in watched:
            agent.close()
