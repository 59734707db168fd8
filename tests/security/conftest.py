# SPDX-License-Identifier: Apache-2.0
"""The summary of a run: attacks made, and how many got in."""

from __future__ import annotations

import pytest

from tests.security.hostile import GOT_IN, MADE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts."""
    if MADE:
        terminalreporter.section("hostile peers")
        for kind, made in sorted(MADE.items()):
            terminalreporter.line(
                f"{made:6}  {kind}" + (f": GOT IN {GOT_IN[kind]}" * bool(GOT_IN[kind]))
            )
        terminalreporter.line(f"attempts made {sum(MADE.values())}, got in {sum(GOT_IN.values())}")
