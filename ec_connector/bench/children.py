# SPDX-License-Identifier: Apache-2.0
"""Programs of the benchmark that run in processes of their own.

Parent and child exchange JSON values, one a line. A child ends when its
standard input does, and with its parent however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ec_connector.bench.ours import BenchError

_PR_SET_PDEATHSIG = 1
_TAIL = 2000
_ANSWERS = "EC_CONNECTOR_BENCH_ANSWERS"


class Child:
    """A child process, from its start to its end.

    Args:
        module: run as ``python -m``.
        arguments: its command line.
        env: added to this process's environment.
        prefix: a command that runs the command behind it.
        pass_fds: descriptors to inherit.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._module = module
        # Not a pipe: nobody would read it while the child works.
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        # Libraries print what they like; answers have a pipe of their own.
        self._answers, theirs = os.pipe()
        self._unread = b""
        try:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=self._words,
                stderr=self._words,
                pass_fds=[*pass_fds, theirs],
                env={
                    **os.environ,
                    "PYTHONPATH": _python_path(),
                    **(env or {}),
                    _ANSWERS: str(theirs),
                },
            )
        finally:
            os.close(theirs)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, value: Any, timeout: float) -> Any:
        """Send a value and return the answer. Raises BenchError without one."""
        self.send(value)
        return self.answer(timeout)

    def send(self, value: Any) -> None:
        """Send a value. Raises BenchError when the child is gone."""
        stdin = self._process.stdin
        try:
            if stdin is not None:
                stdin.write(json.dumps(value).encode() + b"\n")
                stdin.flush()
        except OSError as error:
            raise self._broken(f"is gone ({error})") from error

    def answer(self, timeout: float) -> Any:
        """The next value it gives. Raises BenchError if none comes in ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise self._broken(f"gave no answer within {timeout:g} s")
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise self._broken("ended")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def pause(self) -> None:
        """Stop it where it is; it takes no processor time until :meth:`resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self, patience: float = 10.0) -> None:
        """Let it end, or end it. Idempotent."""
        if self._words.closed:
            return
        if self._process.poll() is None:
            self.resume()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self._words.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _broken(self, what: str) -> BenchError:
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - _TAIL))
        words = self._words.read().decode(errors="replace").strip()
        return BenchError(f"{self._module} {what}" + (f"; its words:\n{words}" if words else ""))


def serve_parent() -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """In a child: each value from the parent, and a function that answers it."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    with os.fdopen(int(os.environ[_ANSWERS]), "w") as answers:

        def answer(value: Any) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        for line in iter(sys.stdin.readline, ""):
            yield json.loads(line), answer


def _python_path() -> str:
    """Where a child finds this package, however it was found here."""
    parent = str(Path(__file__).resolve().parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(paths if parent in paths else [*paths, parent])
