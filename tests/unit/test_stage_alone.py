# SPDX-License-Identifier: Apache-2.0
"""A worker in an environment that holds numpy, pyzmq and msgspec, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ec_connector.stage.errors import StageError
from ec_connector.stage.process import OwnStage

HERE = Path(__file__).resolve().parent
NEEDED = ("msgspec", "numpy", "pyzmq")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of such an environment."""
    home = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=100)
    found = home / "bin" / "python"
    done = subprocess.run(
        [str(found), "-m", "pip", "install", "-q", "--disable-pip-version-check", *NEEDED],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "15"},
    )
    if done.returncode:
        pytest.skip(f"pip cannot install {NEEDED}: {done.stderr[-300:]}")
    return str(found)


@pytest.mark.timeout(240)
def test_a_worker_needs_three_packages(python, tmp_path, monkeypatch):
    """It runs a graph; without onnxruntime a graph for that is refused with what to do."""
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    there = {one["name"].lower() for one in json.loads(listed.stdout)}
    assert there - {"pip", "setuptools"} == set(NEEDED)
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{HERE.parents[1]}")
    (tmp_path / "good").write_text("good")
    graphs = {"good": tmp_path / "good"}
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    with OwnStage(graphs, python=[python], runtime="plain_runtime:Plain") as stage:
        assert Path(stage.facts["executable"]) == Path(python)
        stage.load("good")
        assert np.array_equal(stage.run("good", {"x": x})["double"], 2 * x)
    with OwnStage(graphs, python=[python]) as stage:
        assert stage.facts["versions"]["runtime"] == "onnxruntime not installed"
        assert stage.facts["providers"] == []
        with pytest.raises(StageError, match=r"pip install 'ec-connector\[stage\]'") as raised:
            stage.load("good")
        assert raised.value.code == "no_runtime"
