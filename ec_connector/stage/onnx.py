# SPDX-License-Identifier: Apache-2.0
"""Graphs run by ONNX Runtime (the extra ``stage``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ec_connector.stage.assembly import Arrays
from ec_connector.stage.errors import StageError
from ec_connector.stage.runtime import Placement, Port

_DTYPES = {
    "tensor(bool)": "bool",
    "tensor(double)": "float64",
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(int8)": "int8",
    "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64",
    "tensor(uint8)": "uint8",
}

_ELSEWHERE = ("AzureExecutionProvider",)  # sends to a service: never without being asked for


class OnnxRuntime:
    """Opens ``.onnx`` files. Works, without providers, where onnxruntime is not installed."""

    def __init__(self) -> None:
        self._ort: Any = None
        self._missing = ""
        try:
            import onnxruntime
        except ImportError as error:
            self._missing = str(error)
        else:
            self._ort = onnxruntime

    def version(self) -> str:
        """``onnxruntime`` and its version, or that it is not there."""
        return f"onnxruntime {self._ort.__version__}" if self._ort else "onnxruntime not installed"

    def providers(self) -> list[str]:
        """Execution providers that this build has, best first."""
        return list(self._ort.get_available_providers()) if self._ort else []

    def open(self, path: str, providers: Sequence[str]) -> OnnxGraph:
        """Open a file with the first of ``providers`` that is here; none means the best.

        Raises:
            StageError: ``no_runtime``, ``no_provider``, ``load_failed``.
        """
        if not self._ort:
            raise StageError(
                "no_runtime",
                f"the worker's Python cannot import onnxruntime ({self._missing}); "
                "pip install 'ec-connector[stage]' there, or start it with --runtime",
            )
        available = self.providers()
        local = [name for name in available if name not in _ELSEWHERE]
        usable = [name for name in providers if name in available] if providers else local
        if not usable:
            raise StageError(
                "no_provider",
                f"none of the providers asked for ({', '.join(providers)}) is available; "
                f"this worker has {', '.join(available)}",
            )
        try:
            session = self._ort.InferenceSession(path, providers=usable)
        except Exception as error:
            raise StageError("load_failed", f"cannot open {path}: {error}") from error
        placed = session.get_providers()[0]
        why = f"the first available of {', '.join(providers or ['those that this build has'])}"
        if placed != usable[0]:
            why = f"{usable[0]} was wanted, but ONNX Runtime could not place the graph on it"
        device = placed.removesuffix("ExecutionProvider").lower()
        return OnnxGraph(session, Placement(device, placed, why))


class OnnxGraph:
    """An open session."""

    def __init__(self, session: Any, placement: Placement) -> None:
        self._session = session
        self.placement = placement
        self.metadata: dict[str, str] = dict(session.get_modelmeta().custom_metadata_map)
        self.inputs = [_port(one) for one in session.get_inputs()]
        self.outputs = [_port(one) for one in session.get_outputs()]

    def run(self, arrays: Arrays, outputs: Sequence[str]) -> Arrays:
        """Outputs by name."""
        return dict(zip(outputs, self._session.run(list(outputs), arrays), strict=True))


def _port(described: Any) -> Port:
    dtype = _DTYPES.get(described.type)
    if dtype is None:
        raise StageError(
            "load_failed", f"{described.name!r} is {described.type}, which cannot be carried"
        )
    shape = [size if isinstance(size, int) else -1 for size in described.shape]
    return Port(described.name, dtype, shape)
