# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/security.md run as they stand, and agents follow what they did."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ec_connector.config import Settings
from ec_connector.curve import AllowedKeys, load_keys, public_key

pytest.importorskip("typer", reason="the cli extra is not installed")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
CLI = "import sys; from ec_connector.cli import main; sys.exit(main(sys.argv[1:]))"


def blocks() -> list[list[list[str]]]:
    """The words of each command of each block between the two marks."""
    found = re.search(r"<!-- collecting keys:[^\n]*-->\n(.*?)<!-- /collecting", PAGE, re.DOTALL)
    assert found is not None
    return [
        [shlex.split(line.removeprefix("$ "), comments=True) for line in block.splitlines()]
        for block in re.findall(r"```console\n(.*?)```", found[1], re.DOTALL)
    ]


def ran(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """One command, ours by this interpreter."""
    if words[0] == "ec-connector":
        words = [sys.executable, "-c", CLI, *words[1:]]
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=50
    )


def test_collecting_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side has what it needs, doctor says so, and the list is followed as it changes."""
    monkeypatch.chdir(tmp_path)
    collect, look, change = blocks()
    for words in collect:
        done = ran(words, tmp_path)
        assert done.returncode == 0, (words, done.stderr)
    settings = [Settings.from_json(words[words.index("--config") + 1]) for words in look]
    producer, consumer = settings
    assert load_keys(Path(producer.curve_keys)).server is not None
    theirs = load_keys(Path(consumer.curve_keys))
    assert theirs.server is None
    assert theirs.server_public == public_key(Path("producer-keys/server.key"))
    assert theirs.client is not None
    for words, said in zip(look, ("serves 1 client keys", "may fetch"), strict=True):
        done = ran([*words, "--json"], tmp_path)
        (access,) = [one for one in json.loads(done.stdout) if one["check"] == "who may connect"]
        assert access["status"] == "good"
        assert said in access["text"]
    now = time.monotonic()
    allowed = AllowedKeys(Path(producer.curve_allow), now)
    assert allowed.allows(theirs.client.public)
    for words in change:
        done = ran(words, tmp_path)
        assert done.returncode == 0, (words, done.stderr)
    assert allowed.refresh(now + 1.0)
    assert allowed.allows(public_key(Path("late-keys/client.key")))
    assert not allowed.allows(theirs.client.public)
