# SPDX-License-Identifier: Apache-2.0
"""The life of an engine's agent, as the engine's side sees it."""

from __future__ import annotations

import enum
from typing import Final

from ec_connector.states import Table


class Life(enum.Enum):
    """Whether an agent serves."""

    STARTING = "starting"
    SERVING = "serving"
    BACKOFF = "dead, to be started again"
    GONE = "dead, and not ours to start"
    CLOSED = "closed"


_CLOSES = {"closed": Life.CLOSED}
LIFE: Final = Table(
    "agent",
    Life.STARTING,
    {
        Life.STARTING: {"serves": Life.SERVING} | _CLOSES,
        Life.SERVING: {"ended": Life.BACKOFF, "ended elsewhere": Life.GONE} | _CLOSES,
        Life.BACKOFF: {"start failed": Life.BACKOFF, "serves": Life.SERVING} | _CLOSES,
        Life.GONE: _CLOSES,
    },
)
