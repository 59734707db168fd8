# SPDX-License-Identifier: Apache-2.0
"""The examples run as their own texts say."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_numpy_pair() -> None:
    """Two processes, one item, and an end in order."""
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "numpy_pair.py")],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("bfloat16 (256, 1024), mean ")


def test_one_machine_starts_three_and_ends_them(tmp_path: Path) -> None:
    """With stand-ins for the servers: the flags arrive whole, and one that ends takes all along."""
    log = tmp_path / "log"
    for name in ("serve", "ec-connector"):
        script = tmp_path / name
        # The last one started ends first; the others would go on for a minute.
        seconds = "1" if name == "ec-connector" else "60"
        script.write_text(f'#!/bin/sh\necho "$0 $$ $*" >> {log}\nexec sleep {seconds}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    env = {**os.environ, "MODEL": "a/model", "SERVE": str(tmp_path / "serve"),
           "PATH": f"{tmp_path}:{os.environ['PATH']}"}  # fmt: skip
    ran = subprocess.run(
        [str(EXAMPLES / "one_machine.sh")], env=env, capture_output=True, text=True, timeout=30
    )
    assert ran.returncode == 0, ran.stderr
    lines = log.read_text().splitlines()
    assert len(lines) == 3
    for role, port in (("ec_producer", "8101"), ("ec_consumer", "8102")):
        flag = f'{{"ec_connector": "ECPoolConnector", "ec_role": "{role}"}}'
        assert any(f"a/model --port {port} --ec-transfer-config {flag}" in line for line in lines)
    deadline = time.monotonic() + 5.0
    pids = [int(line.split()[1]) for line in lines]
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_one_machine_wants_a_model() -> None:
    """Without a model nothing is started."""
    env = {name: value for name, value in os.environ.items() if name != "MODEL"}
    ran = subprocess.run(
        [str(EXAMPLES / "one_machine.sh")], env=env, capture_output=True, text=True, timeout=30
    )
    assert ran.returncode != 0
    assert "set MODEL" in ran.stderr
