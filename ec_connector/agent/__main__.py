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
from ec_connector.config import AgentOptions, Settings
from ec_connector.errors import ECConnectorError

FILES_PER_PEER = 4


def least_files(settings: Settings) -> int:
    """Descriptors of an agent without peers. With fewer ZeroMQ ends the process in its own way."""
    return 36 + 2 * settings.lanes


def run(options: AgentOptions, announce: Callable[[dict[str, object]], None]) -> int:
    """Serve until a signal or the owner's death. Returns the exit status."""
    logging.basicConfig(
        stream=sys.stderr,
        level=options.log_level,
        format=f"%(levelname)s %(asctime)s [ec-agent {os.getpid()}] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    # A soft limit of 1024 is common.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = least_files(options.settings)
    if most < least:
        announce(
            {
                "error": f"only {most} files may be open (ulimit -n), and an agent needs "
                f"{least}, and {FILES_PER_PEER} for each peer; raise the limit"
            }
        )
        return 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    keep_buffers()
    try:
        agent = Agent(options)
    except ECConnectorError as error:
        announce({"error": str(error)})
        return 1
    except KeyboardInterrupt:
        announce({"error": "interrupted before it served"})
        return 1
    settle()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, lambda *_: agent.stop())
    facts: dict[str, object] = {
        "endpoint": agent.clients.endpoint,
        "pid": os.getpid(),
        "peer_host": agent.host,
        "peer_port": agent.port,
        "pool_bytes": options.settings.pool_size,
    }
    try:
        if not _said(announce, facts):
            return 1
        agent.run()
    finally:
        agent.close()
    return 0


def _said(announce: Callable[[dict[str, object]], None], facts: dict[str, object]) -> bool:
    try:
        announce(facts)
    except OSError as error:
        # What could not be written is kept, and would be tried again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"cannot say where this agent listens: {error}", file=sys.stderr)
        return False
    return True


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
