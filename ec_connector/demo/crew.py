# SPDX-License-Identifier: Apache-2.0
"""The demo's engines and routers, by the part they play."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ec_connector.demo.chat import Body, ask
from ec_connector.demo.measure import Pair
from ec_connector.demo.readings import COUNTING_ENV, COUNTING_OPTIONS
from ec_connector.demo.report import start_shown
from ec_connector.demo.servers import (
    Server,
    ServerError,
    Servers,
    free_ports,
    vllm_command,
    vllm_env,
)

PRODUCER: dict[str, Any] = {"ec_connector": "ECPoolConnector", "ec_role": "ec_producer"}
CONSUMER: dict[str, Any] = {"ec_connector": "ECPoolConnector", "ec_role": "ec_consumer"}
ROUTER = "router"


def shared_folder(role: str, folder: Path) -> dict[str, Any]:
    """The configuration of vLLM's own ECExampleConnector, which passes files through a folder."""
    return {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(folder)},
    }


class Crew:
    """Starts and ends them, each engine on a core of its own where there are enough."""

    def __init__(self, servers: Servers, console: Console) -> None:
        self._servers = servers
        self._console = console
        self._engines = 0

    def vllm(self, name: str, model: Path, ec: Mapping[str, Any] | None = None) -> Server:
        """Start an ordinary vLLM, or with ``ec`` one side of a pair."""
        port = free_ports(1)[0]
        self._engines += 1
        return self._servers.start(
            name,
            vllm_command(model, port, *COUNTING_OPTIONS, ec=ec),
            port=port,
            env={**vllm_env(self._engines), **COUNTING_ENV},
        )

    def router(self, producer: Server, consumer: Server, *options: str, port: int = 0) -> Server:
        """Start the router before a pair, on this port, or on a free one."""
        port = port or free_ports(1)[0]
        command = [sys.executable, "-m", "ec_connector.proxy", "--port", str(port)]
        command += ["--encode", producer.url, "--decode", consumer.url, *options]
        return self._servers.start(ROUTER, command, port=port)

    def wait(self, *starting: Server) -> None:
        """Wait until all of these answer. Raises ServerError."""
        start_shown(self._console, self._servers, starting)
        for server in starting:
            if server.name == ROUTER:
                _see_all(server)

    def stop(self, *ending: Server) -> None:
        """End these."""
        self._servers.stop(ending)


def _see_all(router: Server) -> None:
    """Have a router look at its servers: it may have given up some while they were starting."""
    with urllib.request.urlopen(f"{router.url}/ready", timeout=10.0) as answer:
        healthy = json.load(answer)["healthy"]
    if not all(healthy.values()):
        raise ServerError(f"the router finds these servers healthy, or not: {healthy}")


def pair_of(producer: Server, consumer: Server, router: Server) -> Pair:
    """Where to reach a pair."""
    return Pair(producer.url, consumer.url, router.url)


def warm(bodies: Sequence[Body], *servers: Server) -> None:
    """Have each server answer each request once, so that what is measured is no first time."""
    for server in servers:
        for body in bodies:
            ask(server.url, body)
