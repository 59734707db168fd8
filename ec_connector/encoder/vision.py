# SPDX-License-Identifier: Apache-2.0
"""From a picture to its rows: the model's own processor here, the graph in a stage's worker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ec_connector.encoder.rows import as_rows
from ec_connector.errors import ConfigError
from ec_connector.stage.caller import Stage
from ec_connector.stage.errors import StageDeadlineError, StageError, StageLostError

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger("vllm.ec_connector.encoder")

RESTART_SECONDS = 1.0
Preprocess = Callable[["Image"], Mapping[str, np.ndarray[Any, Any]]]


def load_processor(folder: Path) -> Preprocess:
    """The image processor of a Hugging Face checkpoint's folder.

    Raises:
        ConfigError: there is none in it.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        of_images = getattr(processor, "image_processor", processor)
    except Exception as error:
        raise ConfigError(
            f"--processor {str(folder)!r} holds no processor that transformers can load: {error}"
        ) from error

    def preprocess(image: Image) -> Mapping[str, np.ndarray[Any, Any]]:
        # Torch tensors only by way of numpy: this works without torch too.
        return dict(of_images(images=[image], return_tensors="np"))

    return preprocess


class Vision:
    """Encodes one picture at a time; a worker that was lost is replaced for the next.

    Args:
        preprocess: pictures to named arrays.
        start: makes a stage whose worker has the graph.
        graph: the graph's name there.
        dtype: of the rows, without ``torch.``.
        timeout: seconds that one picture may take in the worker.

    Raises:
        StageError, ConfigError: the worker does not come up, or cannot open the graph.
    """

    def __init__(
        self,
        preprocess: Preprocess,
        start: Callable[[], Stage],
        graph: str,
        dtype: str,
        timeout: float,
    ) -> None:
        self._preprocess = preprocess
        self._start = start
        self._graph = graph
        self._dtype = dtype
        self._timeout = timeout
        self._lock = threading.Lock()
        self._stage: Stage | None = None
        self._next_start = 0.0
        self._facts = self._load()

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the worker said when it opened the graph."""
        return self._facts

    @property
    def ready(self) -> bool:
        """Whether there is a worker, as far as is known."""
        return self._stage is not None

    def encode(self, image: Image) -> np.ndarray[Any, Any]:
        """Rows ``[rows, width]`` of the dtype (bfloat16 as ``uint16``).

        Raises:
            StageError: this picture cannot be encoded; the text says why.
        """
        arrays = self._preprocess(image)
        with self._lock:
            if self._stage is None:
                self._restart()
            return self._run(arrays)

    def close(self) -> None:
        """End the worker, if it is ours."""
        with self._lock:
            self._give_up()

    def _run(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        wanted = {port["name"]: np.dtype(port["dtype"]) for port in self._facts["inputs"]}
        missing = sorted(wanted.keys() - arrays.keys())
        if missing:
            raise StageError(
                "bad_input",
                f"graph {self._graph!r} takes {', '.join(wanted)}, but the processor gives "
                f"{', '.join(arrays)}: export the graph with inputs of those names",
            )
        inputs = {name: np.asarray(arrays[name]).astype(kind) for name, kind in wanted.items()}
        output = self._facts["outputs"][0]["name"]
        stage = self._stage
        if stage is None:
            raise StageLostError("there is no worker")
        try:
            return as_rows(
                stage.run(self._graph, inputs, [output], self._timeout)[output], self._dtype
            )
        except (StageLostError, StageDeadlineError) as error:
            logger.error("the worker is given up: %s", error.message)
            self._give_up()
            raise

    def _restart(self) -> None:
        if time.monotonic() < self._next_start:
            raise StageLostError("the worker was lost and is not back yet")
        try:
            self._facts = self._load()
        except ConfigError as error:
            raise StageLostError(f"the worker was lost and cannot be started: {error}") from error
        logger.info("a worker is there again")

    def _load(self) -> Mapping[str, Any]:
        # Also after a failed start: one that cannot come up must not be tried without a pause.
        self._next_start = time.monotonic() + RESTART_SECONDS
        stage = self._start()
        try:
            facts = stage.load(self._graph)
        except BaseException:
            stage.close()
            raise
        self._stage = stage
        return facts

    def _give_up(self) -> None:
        if self._stage is not None:
            self._stage.close()
            self._stage = None
