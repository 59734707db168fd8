# SPDX-License-Identifier: Apache-2.0
"""``python -m ec_connector.agent``: options as one line of JSON on standard input.

Answers with one line of JSON on standard output, ``{"endpoint": ...}`` once it
serves or ``{"error": ...}`` (exit status 1) when it cannot.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable

from ec_connector.agent.loop import Agent
from ec_connector.agent.memory import keep_buffers, settle
from ec_connector.config import AgentOptions
from ec_connector.errors import ECConnectorError


def run(options: AgentOptions, announce: Callable[[dict[str, object]], None]) -> int:
    """Serve until a signal or the owner's death. Returns the exit status."""
    logging.basicConfig(
        stream=sys.stderr,
        level=options.log_level,
        format=f"%(levelname)s %(asctime)s [ec-agent {os.getpid()}] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    # Each peer takes some four descriptors, and a soft limit of 1024 is common.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    keep_buffers()
    try:
        agent = Agent(options)
    except ECConnectorError as error:
        announce({"error": str(error)})
        return 1
    settle()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    announce(
        {
            "endpoint": agent.clients.endpoint,
            "pid": os.getpid(),
            "peer_host": agent.host,
            "peer_port": agent.port,
            "pool_bytes": options.settings.pool_size,
        }
    )
    try:
        agent.run()
    finally:
        agent.close()
    return 0


def _announce(facts: dict[str, object]) -> None:
    print(json.dumps(facts), flush=True)


def main() -> int:
    """Entry point of the agent process."""
    try:
        options = AgentOptions.from_json(sys.stdin.buffer.readline())
    except ECConnectorError as error:
        _announce({"error": str(error)})
        return 1
    return run(options, _announce)


if __name__ == "__main__":
    raise SystemExit(main())
