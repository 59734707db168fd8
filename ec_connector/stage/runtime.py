# SPDX-License-Identifier: Apache-2.0
"""What a worker needs of whatever runs graphs; ONNX Runtime is the one that comes with it.

Another is named on the worker's command line, ``--runtime my_npu:Runtime``, and is a class
like :class:`Runtime`. Nothing that a caller sends can name one.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ec_connector.errors import ConfigError
from ec_connector.stage.assembly import Arrays
from ec_connector.stage.errors import StageError

ONNX = "ec_connector.stage.onnx:OnnxRuntime"


class Port(NamedTuple):
    """One input or output: dtype in numpy's name, sizes of axes, -1 for one that varies."""

    name: str
    dtype: str
    shape: list[int]


class Placement(NamedTuple):
    """Where a graph runs, with which execution provider, and why there."""

    device: str
    provider: str
    why: str


class Graph(Protocol):
    """A graph that was opened. ``run`` gives one array per output asked for.

    ``metadata`` is what the graph says of itself, text by name.
    """

    placement: Placement
    metadata: dict[str, str]
    inputs: Sequence[Port]
    outputs: Sequence[Port]

    def run(self, arrays: Arrays, outputs: Sequence[str]) -> Arrays: ...


class Runtime(Protocol):
    """Opens graphs. Made without arguments, once per worker."""

    def version(self) -> str: ...

    def providers(self) -> list[str]: ...

    def open(self, path: str, providers: Sequence[str]) -> Graph: ...


def find_runtime(name: str) -> Runtime:
    """The runtime class named ``module:Class``, made.

    Raises:
        ConfigError: there is no such module or class.
    """
    module, _, attribute = name.partition(":")
    try:
        found: Runtime = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--runtime {name!r} cannot be used: {error}; write module:Class of something "
            "that this Python can import"
        ) from error
    return found


def check_inputs(
    graph: str, ports: Sequence[Port], arrays: dict[str, np.ndarray[Any, Any]]
) -> None:
    """Raise StageError, ``bad_input``, for tensors that the graph does not take; says why not."""
    known = {port.name: port for port in ports}
    wrong = [f"{name!r} is no input of it" for name in arrays if name not in known]
    for name, port in known.items():
        array = arrays.get(name)
        if array is None:
            wrong.append(f"{name!r} is missing")
            continue
        if array.dtype != np.dtype(port.dtype):
            wrong.append(f"{name!r} is {array.dtype.str}, not {port.dtype}")
        fits = len(array.shape) == len(port.shape) and all(
            want in (-1, have) for want, have in zip(port.shape, array.shape, strict=False)
        )
        if not fits:
            wrong.append(f"{name!r} has shape {list(array.shape)}, not {port.shape}")
    if wrong:
        takes = ", ".join(f"{port.name}: {port.dtype} {port.shape}" for port in ports)
        raise StageError(
            "bad_input", f"graph {graph!r} takes {takes or 'nothing'}, but {'; '.join(wrong)}"
        )
