# SPDX-License-Identifier: Apache-2.0
"""Encoder outputs of multimodal models, moved between vLLM engines.

The names below are imported when they are first used, so that ``import
ec_connector`` alone loads neither vLLM, torch, ZMQ nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ec_connector.connector import ECPoolConnector
    from ec_connector.library import Consumer, Producer

__version__ = "0.1.0"

__all__ = ["Consumer", "ECPoolConnector", "Producer", "__version__"]

_HOME_OF = {
    "Consumer": "ec_connector.library",
    "ECPoolConnector": "ec_connector.connector",
    "Producer": "ec_connector.library",
}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
