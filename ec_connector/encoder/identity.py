# SPDX-License-Identifier: Apache-2.0
"""What this encoder is to consumers: the factors that a vLLM consumer compares and we can know."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ec_connector.dtypes import lookup
from ec_connector.encoder.rows import DTYPES
from ec_connector.engine.checkpoint import weights_digest
from ec_connector.errors import ConfigError

logger = logging.getLogger("vllm.ec_connector.encoder")

WEIGHTS = "ec_connector.weights"
"""Metadata of a graph: the digest of the checkpoint that it was exported from."""


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint; empty where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it holds no object")
        return config
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def choose_dtype(given: str, config: Mapping[str, Any]) -> str:
    """The element type of consumers: as given, else the checkpoint's.

    Raises:
        ConfigError: neither says one that is supported.
    """
    found = given or str(config.get("dtype") or config.get("torch_dtype") or "")
    if found not in DTYPES:
        raise ConfigError(
            f"the checkpoint's dtype is {found or 'not told'}; give --dtype, the one that "
            f"consumers run with: {', '.join(DTYPES)}"
        )
    return found


def factors(
    model: str,
    dtype: str,
    width: int,
    config: Mapping[str, Any],
    folder: Path,
    metadata: Mapping[str, str],
) -> dict[str, str | dict[str, Any]]:
    """Factors by name; what is not known here is left out, and then not compared.

    Raises:
        ConfigError: the graph was made of other weights than the folder holds.
    """
    known: dict[str, str | dict[str, Any]] = {
        "model": model,
        "dtype": f"torch.{dtype}",
        "width_image": str(width),
        # A request that brings any is refused, so these are always none.
        "mm_processor_kwargs": {},
        "media_io_kwargs": {},
    }
    text = config.get("text_config")
    hidden = (text if isinstance(text, dict) else config).get("hidden_size")
    if isinstance(hidden, int):
        known["row_bytes"] = str(hidden * lookup(dtype).itemsize)
    told = metadata.get(WEIGHTS, "")
    here = weights_digest(folder)
    if told and here and told != here:
        raise ConfigError(
            f"the graph was exported from other weights ({told}) than {folder} holds ({here}): "
            "export it anew"
        )
    if told:
        known["weights"] = told
    else:
        logger.warning(
            "the graph does not say of which weights it was made (metadata %s), so consumers "
            "cannot tell whether theirs are the same: make sure of it", WEIGHTS,
        )  # fmt: skip
    return known
