# SPDX-License-Identifier: Apache-2.0
"""The README says what the code does: its settings, reasons, links, Python and commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ec_connector import errors
from ec_connector.config import SETTING_KEYS, Settings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def settings_table() -> str:
    """The table between the two marks, as the code would have it."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    defaults = Settings()
    for key in SETTING_KEYS:
        value = key.written(getattr(defaults, key.name))
        text = ", ".join(value) if isinstance(value, list) else str(value)
        rows.append(f"| `{key.name}` | {f'`{text}`' if text else ''} | {key.description} |")
    return "\n".join(rows)


def test_settings() -> None:
    """Every setting is listed with its default and its description, and nothing else is."""
    found = re.search(r"<!-- settings:[^\n]*-->\n(.*?)\n<!-- /settings -->", README, re.DOTALL)
    assert found is not None
    assert found[1] == settings_table()


def test_reasons() -> None:
    """Every reason for which a fetch can fail has its line."""
    section = README.split("## When it fails")[1].split("\n## ")[0]
    listed = set(re.findall(r"`([a-z_]+)`", section.split("With the media")[0]))
    reasons = {kind.reason for kind in errors.FetchError.__subclasses__()}
    assert reasons <= listed


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)", README))
def test_links(target: str) -> None:
    """Every link to a file leads to one."""
    assert (ROOT / target).exists()


def test_python_example() -> None:
    """The example runs as it stands, with the bytes right (its own assert)."""
    code = README.split("```python\n")[1].split("```")[0]
    assert "assert" in code
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_make_targets() -> None:
    """Every make command in the README is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)\b(?! and)", README)) & targets >= {"demo", "test"}
