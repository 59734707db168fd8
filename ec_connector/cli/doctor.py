# SPDX-License-Identifier: Apache-2.0
"""Whether this host and this Python can run the connector, check by check."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ec_connector.cli import checks
from ec_connector.cli.checks import GOOD, NOTE, PROBLEM, Outcome
from ec_connector.config import Settings

__all__ = ["CHECKS", "GOOD", "NOTE", "PROBLEM", "Finding", "examine"]

CHECKS: tuple[tuple[str, Callable[[Settings], Outcome]], ...] = (
    ("python", checks.python),
    ("libraries", checks.libraries),
    ("vllm", checks.vllm),
    ("plugin", checks.plugin),
    ("process watching", checks.process_watching),
    ("shared memory", checks.shared_memory),
    ("open files", checks.open_files),
    ("pool size", checks.pool_size),
    ("address", checks.address),
    ("who may connect", checks.access),
    ("codecs", checks.codecs),
)
"""Every check, in the order in which a start would meet them."""


class Finding(msgspec.Struct, frozen=True):
    """``status`` is ``"good"``, ``"note"`` (works, but worth knowing) or ``"problem"``."""

    check: str
    status: str
    text: str


def examine(settings: Settings) -> list[Finding]:
    """Run every check."""
    return [Finding(name, *check(settings)) for name, check in CHECKS]
