# SPDX-License-Identifier: Apache-2.0
"""Looking at agents again and again, in a terminal or as lines of JSON."""

from __future__ import annotations

import time
from contextlib import nullcontext

import msgspec
from rich.console import Console
from rich.live import Live

from ec_connector.cli.agents import Watched, states, watch
from ec_connector.cli.top import screen
from ec_connector.protocol.local import State, Transfer

KEPT = 64
"""Transfers of an agent that are remembered between looks, to show the latest."""


class Looks:
    """What agents said, each look beside the one before.

    Args:
        agents: those to ask at first.
        fixed: ask no other ones; else agents that come are found.
    """

    def __init__(self, agents: list[Watched], fixed: bool) -> None:
        self._agents = agents
        self._fixed = fixed
        self._latest: dict[int, list[Transfer]] = {}
        self._at = 0.0
        self.before: dict[int, State] = {}
        self.now: dict[int, State] = {}
        self.seconds = 0.0

    def look(self) -> list[State]:
        """Ask all of them. ``transfers`` of what is returned are the latest, old ones too."""
        if not self._fixed and self._at:
            self._agents += watch(known={agent.endpoint for agent in self._agents})
        now = time.monotonic()
        self.seconds, self._at = now - self._at, now
        said = states(self._agents)
        for state in said:
            kept = [*self._latest.get(state.agent_pid, ()), *state.transfers][-KEPT:]
            self._latest[state.agent_pid] = state.transfers = kept
        self.before, self.now = self.now, {state.agent_pid: state for state in said}
        self._latest = {pid: kept for pid, kept in self._latest.items() if pid in self.now}
        return said

    def close(self) -> None:
        """Leave them."""
        for agent in self._agents:
            agent.close()


def follow(
    agents: list[Watched],
    console: Console,
    interval: float,
    *,
    once: bool,
    as_json: bool,
    fixed: bool,
) -> None:
    """Show agents every ``interval`` seconds until interrupted or, if ``fixed``, they are gone."""
    looks = Looks(agents, fixed)
    live = Live(console=console, screen=True, auto_refresh=False)
    on_screen = not (once or as_json)
    try:
        with live if on_screen else nullcontext():
            while (said := looks.look()) or not fixed:
                if as_json:
                    print(msgspec.json.encode(said).decode(), flush=True)
                elif on_screen:
                    live.update(screen(said, looks.before, looks.seconds), refresh=True)
                else:
                    console.print(screen(said, looks.before, looks.seconds))
                if once:
                    return
                time.sleep(interval)
    except KeyboardInterrupt:
        return
    finally:
        looks.close()
