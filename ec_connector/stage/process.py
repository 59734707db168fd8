# SPDX-License-Identifier: Apache-2.0
"""A stage whose worker is a child of this process, in whatever interpreter it needs."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ec_connector.errors import ConfigError
from ec_connector.stage.caller import START_SECONDS, Stage
from ec_connector.stage.messages import DEFAULT_PAYLOAD_BYTES
from ec_connector.stage.runtime import ONNX

_PATIENCE_SECONDS = 2.0


class OwnStage(Stage):
    """Starts a worker that connects back here over the loopback, and ends it with itself.

    Args:
        graphs: names and files for the worker.
        python: its interpreter, with numpy, pyzmq and msgspec; this one by default.
        runtime: see :mod:`ec_connector.stage.runtime`.

    Raises:
        ConfigError: the interpreter cannot be started.
        StageError: the worker did not come up.
    """

    def __init__(
        self,
        graphs: Mapping[str, Path],
        *,
        python: Sequence[str] = (sys.executable,),
        runtime: str = ONNX,
        payload_limit: int = DEFAULT_PAYLOAD_BYTES,
        start_timeout: float = START_SECONDS,
    ) -> None:
        token = secrets.token_hex(16)
        super().__init__(listen="127.0.0.1:0", payload_limit=payload_limit, token=token)
        command = [*python, "-P", "-m", "ec_connector.stage", "--owned", "--runtime", runtime]
        command += ["--connect", self.address, "--payload-limit", str(payload_limit)]
        for name, path in graphs.items():
            command += ["--graph", f"{name}={path}"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            self._link.close()
            raise ConfigError(f"cannot start {' '.join(command)}: {error}") from error
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(token.encode() + b"\n")
                self._process.stdin.flush()
            self.facts = self.hello(start_timeout)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def ended(self, patience: float = 0.0) -> str:
        """How the worker ended; empty while it runs, for ``patience`` seconds at most."""
        try:
            status = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return ""
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}; its own words are on standard error"

    def close(self) -> None:
        """End the worker, politely unless it does not answer. Idempotent."""
        if self._process.poll() is None and self._broken:
            self._process.kill()  # lost or late: it may hang
        super().close()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it was gone before it read its token
                self._process.stdin.close()


def _environment() -> dict[str, str]:
    """This process's environment, with this package importable where it is not installed.

    Never the folder that it is installed in: another interpreter would then load the numpy
    that belongs to this one.
    """
    parent = str(Path(__file__).resolve().parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if parent not in (*paths, *site.getsitepackages(), site.getusersitepackages()):
        paths.append(parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
