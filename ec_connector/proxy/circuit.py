# SPDX-License-Identifier: Apache-2.0
"""Whether a server gets requests: what came of earlier ones and of health checks decides.

Time is passed in; nothing here waits or connects.
"""

from __future__ import annotations

import enum
from typing import Final

from ec_connector.states import Table

FAILURES = 3
"""So many in a row take a server out."""
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
"""Seconds that a server stays out whatever its health check says: doubled each time that it
fails on trial, so that one whose health check is wrong is not tried all the time."""


class State(enum.Enum):
    """Where a server stands."""

    SERVING = "serving"
    OUT = "out: gets no requests"
    TRIAL = "on trial: gets one request at a time"
    REMOVED = "removed"


CIRCUIT: Final = Table(
    "server",
    State.SERVING,
    {
        State.SERVING: {
            "worked": State.SERVING,
            "failed": State.SERVING,
            "failed too often": State.OUT,
            "removed": State.REMOVED,
        },
        State.OUT: {
            # Of requests that were sent before.
            "worked": State.OUT,
            "failed": State.OUT,
            "healthy again": State.SERVING,
            "to be tried": State.TRIAL,
            "removed": State.REMOVED,
        },
        State.TRIAL: {
            "worked": State.SERVING,
            "failed too often": State.OUT,
            "removed": State.REMOVED,
        },
    },
)


class Circuit:
    """One server's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = CIRCUIT.start
        self.failures = 0  # in a row
        self._wait = FIRST_WAIT
        self._out_until = 0.0
        self._seen_ill = False  # by a health check, since it last served

    def worked(self) -> None:
        """A request was answered."""
        if self.state is State.REMOVED:
            return
        self.failures = 0
        if self.state is not State.OUT:
            self._wait = FIRST_WAIT
        self._move("worked")

    def failed(self, now: float) -> bool:
        """A request got no answer, or a health check failed. Whether that took the server out."""
        if self.state is State.REMOVED:
            return False
        self.failures += 1
        on_trial = self.state is State.TRIAL
        if not on_trial and (self.failures < FAILURES or self.state is State.OUT):
            self._move("failed")
            return False
        if on_trial:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        self._out_until = now + self._wait
        self._move("failed too often")
        return True

    def checked(self, healthy: bool, now: float) -> bool:
        """The outcome of a health check. Whether it changed anything.

        One that has seen that the server was ill is believed when it says that it is well; one
        that has seen nothing of what failed is not.
        """
        if self.state is State.REMOVED:
            return False
        if not healthy:
            self._seen_ill = True
            return self.failed(now)
        if self.state is not State.OUT:
            self._seen_ill = False
            return False
        if self._seen_ill:
            self._seen_ill, self.failures = False, 0
            self._move("healthy again")
            return True
        if now < self._out_until:
            return False
        self._move("to be tried")
        return True

    def removed(self) -> None:
        """The server is no longer one of ours; what its last requests do changes nothing."""
        self._move("removed")

    def _move(self, event: str) -> None:
        self.state = CIRCUIT.after(
            self.state, event, self.name, lambda: f"{self.failures} failures in a row"
        )
