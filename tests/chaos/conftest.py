# SPDX-License-Identifier: Apache-2.0
"""The summary of a run: faults that were injected, and how requests ended."""

from __future__ import annotations

import pytest

from tests.chaos.world import LANDED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts."""
    if LANDED:
        terminalreporter.section("chaos")
        for what, count in sorted(LANDED.items()):
            terminalreporter.line(f"{count:6}  {what}")
