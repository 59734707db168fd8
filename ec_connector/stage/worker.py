# SPDX-License-Identifier: Apache-2.0
"""The worker's side: answers calls one after the other, and outlives whatever goes wrong in one."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from ec_connector import __version__
from ec_connector.stage.assembly import Arrays, Refused
from ec_connector.stage.errors import (
    MAX_TRACEBACK_CHARS,
    StageDeadlineError,
    StageError,
    StageLostError,
)
from ec_connector.stage.link import Link
from ec_connector.stage.messages import Close, Err, Hello, Load, Ok, Reply, Request, Run, Stats
from ec_connector.stage.runtime import Graph, Runtime, check_inputs

logger = logging.getLogger("vllm.ec_connector.stage")

ANSWER_SECONDS = 30.0
"""How long a caller may take to take its answer; meanwhile no other is served."""


class Worker:
    """Serves a link.

    Args:
        link: connected to a caller, or listening for several.
        graphs: what callers may load: a name, and a file of this host.
        runtime: opens those files.
        token: shown to the caller that this worker connects to.
    """

    def __init__(
        self, link: Link, graphs: Mapping[str, Path], runtime: Runtime, token: str = ""
    ) -> None:
        self._link = link
        self._graphs = graphs
        self._runtime = runtime
        self._token = token
        self._loaded: dict[str, Graph] = {}
        self._counts = {"runs": 0, "failures": 0, "bytes_in": 0, "bytes_out": 0}
        self._run_seconds = 0.0
        self._done = False

    def serve(self) -> None:
        """Answer until the one caller that this worker connected to is done.

        Raises:
            StageLostError: that caller is gone.
        """
        if not self._link.listens:
            facts = {"token": self._token, **self._facts()}
            self._introduce(Ok(id=0, facts=facts))
        while not self._done:
            with contextlib.suppress(TimeoutError):
                peer, message, arrays = self._link.receive(time.monotonic() + 3600.0)
                self._answer(peer, message, arrays)

    def _introduce(self, message: Ok) -> None:
        while True:  # the caller may come later than its worker
            with contextlib.suppress(StageDeadlineError):
                self._link.send(b"", message, {}, time.monotonic() + 60.0)
                return

    def _answer(self, peer: bytes, message: Any, arrays: Arrays) -> None:
        if isinstance(message, Refused):
            self._reply(peer, Err(id=message.id, code=message.code, message=message.message))
        elif isinstance(message, Request):
            reply, out = self._perform(message, arrays)
            self._reply(peer, reply, out)
            if isinstance(message, Close) and not self._link.listens:
                self._done = True

    def _perform(self, request: Request, arrays: Arrays) -> tuple[Reply, Arrays]:
        try:
            facts, out = self._do(request, arrays)
            return Ok(id=request.id, facts=facts), out
        except Exception as error:
            self._counts["failures"] += 1
            if isinstance(error, StageError):
                code, message = error.code, error.message
            else:
                code, message = "failed", f"{type(error).__name__}: {error}"
            text = traceback.format_exc()[-MAX_TRACEBACK_CHARS:]
            logger.warning("%s failed: %s", type(request).__name__.lower(), message)
            return Err(id=request.id, code=code, message=message[:8192], traceback=text), {}

    def _do(self, request: Request, arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        if isinstance(request, Load):
            return self._load(request), {}
        if isinstance(request, Run):
            return {}, self._run(request, arrays)
        if isinstance(request, Stats):
            return self._stats(), {}
        return (self._facts() if isinstance(request, Hello) else {}), {}

    def _load(self, request: Load) -> dict[str, Any]:
        path = self._graphs.get(request.graph)
        if path is None:
            raise StageError(
                "unknown_graph",
                f"this worker has no graph {request.graph!r}; it was started with "
                f"{', '.join(sorted(self._graphs)) or 'none'} (--graph NAME=FILE)",
            )
        graph = self._runtime.open(str(path), request.providers)
        self._loaded[request.graph] = graph
        return {
            **graph.placement._asdict(),
            "metadata": graph.metadata,
            "inputs": [port._asdict() for port in graph.inputs],
            "outputs": [port._asdict() for port in graph.outputs],
        }

    def _run(self, request: Run, arrays: Arrays) -> Arrays:
        graph = self._loaded.get(request.graph)
        if graph is None:
            raise StageError("not_loaded", f"graph {request.graph!r} is not loaded: load it first")
        check_inputs(request.graph, graph.inputs, arrays)
        names = [port.name for port in graph.outputs]
        unknown = [name for name in request.outputs if name not in names]
        if unknown:
            raise StageError(
                "bad_input", f"graph {request.graph!r} gives {', '.join(names)}, not {unknown}"
            )
        started = time.perf_counter()
        out = graph.run(arrays, request.outputs or names)
        self._run_seconds += time.perf_counter() - started
        self._counts["runs"] += 1
        self._counts["bytes_in"] += sum(array.nbytes for array in arrays.values())
        self._counts["bytes_out"] += sum(array.nbytes for array in out.values())
        return out

    def _reply(self, peer: bytes, reply: Reply, arrays: Arrays | None = None) -> None:
        until = time.monotonic() + ANSWER_SECONDS
        try:
            try:
                self._link.send(peer, reply, arrays or {}, until)
            except (StageLostError, StageDeadlineError):
                raise
            except StageError as error:  # the result is too large, or nothing that can be sent
                refusal = Err(id=reply.id, code=error.code, message=error.message)
                self._link.send(peer, refusal, {}, until)
        except (StageLostError, StageDeadlineError) as error:
            if not self._link.listens:
                raise StageLostError(error.message) from error
            logger.warning("a caller did not take its answer: %s", error)

    def _stats(self) -> dict[str, Any]:
        return {
            **self._counts,
            "run_seconds": self._run_seconds,
            "loaded": sorted(self._loaded),
            "memory_bytes": _memory_bytes(),
        }

    def _facts(self) -> dict[str, Any]:
        return {
            "python": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "platform": platform.platform(),
            "machine": platform.machine(),
            "pid": os.getpid(),
            "versions": {
                "ec_connector": __version__,
                "msgspec": msgspec.__version__,
                "numpy": np.__version__,
                "pyzmq": zmq.__version__,
                "libzmq": zmq.zmq_version(),
                "runtime": self._runtime.version(),
            },
            "providers": self._runtime.providers(),
            "graphs": sorted(self._graphs),
            "payload_limit": self._link.limit,
        }


def _memory_bytes() -> int | None:
    """Resident memory of this process; None where the system does not tell without a library."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, AttributeError, ValueError):
        return None
