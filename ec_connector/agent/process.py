# SPDX-License-Identifier: Apache-2.0
"""Starting an agent process and ending it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import site
import subprocess
import sys
import time
from pathlib import Path

from ec_connector.config import AgentOptions
from ec_connector.errors import AgentStartError

START_SECONDS = 30.0
START_SECONDS_PER_GIB = 5.0
"""A start takes a third of a second, and up to 3 s for each GiB that is prefaulted."""
_LINE_LIMIT = 64 * 1024
_LAST_MOMENT = 1.0


class AgentProcess:
    """One agent process, from its start to its end.

    It runs in a session of its own, so that Ctrl-C in the engine's terminal does
    not end it before the engine; it ends with ``options.owner_pid`` by itself.

    Raises:
        AgentStartError: it did not come up; the text holds its own words.
    """

    def __init__(self, options: AgentOptions) -> None:
        timeout = START_SECONDS + START_SECONDS_PER_GIB * options.settings.pool_size / 2**30
        # -P: a file in the current directory must not stand in for a module.
        command = [sys.executable, "-P", "-m", "ec_connector.agent"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise AgentStartError(f"cannot start {' '.join(command)}: {error}") from error
        self._stdout = self._process.stdout.fileno() if self._process.stdout is not None else -1
        try:
            facts = self._converse(options, timeout)
        except BaseException:
            self.stop(0)
            raise
        self.endpoint: str = facts["endpoint"]

    @property
    def pid(self) -> int:
        """The agent's process id."""
        return self._process.pid

    def wait(self) -> int:
        """Wait for its end; the exit status."""
        return self._process.wait()

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it at once. Returns before it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def stop(self, patience: float = 2.0) -> None:
        """End it: SIGTERM, then SIGKILL after ``patience`` seconds. Returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _converse(self, options: AgentOptions, timeout: float) -> dict[str, str]:
        stdin = self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            if stdin is not None:
                stdin.write(options.to_json() + b"\n")
                stdin.flush()
        line = self._first_line(timeout)
        if not line.endswith(b"\n"):
            try:
                # Its output ends a moment before it does.
                what = f"ended with status {self._process.wait(_LAST_MOMENT)} before it served"
            except subprocess.TimeoutExpired:
                what = f"did not answer within {timeout:g} s"
            raise AgentStartError(f"the agent {what}; its own words are on standard error")
        try:
            facts: dict[str, str] = json.loads(line)
        except ValueError as error:
            raise AgentStartError(
                f"the agent's first line is not its own: {line[:200]!r}; something that Python "
                "loads at its start writes to standard output"
            ) from error
        if "error" in facts:
            raise AgentStartError(facts["error"])
        return facts

    def _first_line(self, timeout: float) -> bytes:
        fd = self._stdout
        poll = select.poll()  # select() fails where the engine has over 1024 descriptors
        poll.register(fd, select.POLLIN)
        until = time.monotonic() + timeout
        line = b""
        while not line.endswith(b"\n") and len(line) < _LINE_LIMIT:
            ready = poll.poll(max(0.0, until - time.monotonic()) * 1000)
            chunk = os.read(fd, 4096) if ready else b""
            if not chunk:
                break
            line += chunk
        return line


def _environment() -> dict[str, str]:
    """This process's environment, with this package importable however it was found here."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    # Where it is installed it is found anyway; named here, what lies beside it would come
    # before the standard library.
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    if package_parent not in (*paths, *installed):
        paths.append(package_parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
