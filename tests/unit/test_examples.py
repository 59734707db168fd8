# SPDX-License-Identifier: Apache-2.0
"""The examples run as their own texts say."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ec_connector.config import Settings
from ec_connector.proxy.options import parse_options

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


def started(script: str, tmp_path: Path, **env: str) -> list[tuple[list[str], str]]:
    """Arguments and GPUs of all that a script starts, with stand-ins for the servers.

    The stand-in for the router ends first: the script has to take all the others along.
    """
    log = tmp_path / "log"
    log.mkdir()
    for name in ("serve", "ec-connector"):
        stand_in = tmp_path / name
        stand_in.write_text(STAND_IN.format(log=log, seconds=1 if name == "ec-connector" else 60))
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    names = {"MODEL": "a/model", "SERVE": str(tmp_path / "serve")}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(
        [str(EXAMPLES / script)],
        env={**os.environ, **names, **path, **env},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.returncode == 0, ran.stderr
    deadline = time.monotonic() + 5.0
    pids = [path.name for path in log.iterdir()]
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    calls = []
    for pid in pids:
        gpus, name, *args = (log / pid).read_text().split("\0")[:-1]
        calls.append(([Path(name).name, *args], gpus))
    return sorted(calls)


STAND_IN = """#!/bin/sh
printf '%s\\0' "${{CUDA_VISIBLE_DEVICES:-}}" "$0" "$@" > {log}/$$
exec sleep {seconds}
"""


def after(args: list[str], option: str) -> str:
    """The value of an option."""
    return args[args.index(option) + 1]


def test_one_machine_starts_three_and_ends_them(tmp_path: Path) -> None:
    """The flags arrive whole, and one that ends takes all along."""
    (router, _), *engines = started("one_machine.sh", tmp_path, PRODUCER_GPU="3")
    assert router[:2] == ["ec-connector", "proxy"]
    for (args, gpus), role, port, gpu in zip(
        engines, ("ec_producer", "ec_consumer"), ("8101", "8102"), ("3", ""), strict=True
    ):
        assert args[:4] == ["serve", "a/model", "--port", port]
        config = json.loads(after(args, "--ec-transfer-config"))
        assert config == {"ec_connector": "ECPoolConnector", "ec_role": role}
        assert gpus == gpu


def test_two_and_two_agree_on_every_port(tmp_path: Path) -> None:
    """The router is told the engines' addresses, and consumers may dial the producers' alone."""
    (router, _), *engines = started("two_and_two.sh", tmp_path, GPUS="4 5 6 7")
    assert [gpus for _, gpus in engines] == ["4", "5", "6", "7"]
    urls: dict[str, list[str]] = {"ec_producer": [], "ec_consumer": []}
    serving, dialled = [], []
    for args, _ in engines:
        assert args[:2] == ["serve", "a/model"]
        config = json.loads(after(args, "--ec-transfer-config"))
        settings = Settings.parse(config.pop("ec_connector_extra_config", {}))
        urls[config["ec_role"]].append(f"http://127.0.0.1:{after(args, '--port')}")
        if config["ec_role"] == "ec_producer":
            serving.append(f"127.0.0.1:{config['ec_port']}")
        else:
            dialled.append(settings.allow_peers)
    assert len(set(serving)) == 2
    assert dialled == [serving, serving]
    options = parse_options(router[2:])
    assert [one.url for one in options.encode] == urls["ec_producer"]
    assert [one.url for one in options.decode] == urls["ec_consumer"]
    assert (
        len({*urls["ec_producer"], *urls["ec_consumer"], f"http://127.0.0.1:{options.port}"}) == 5
    )


@pytest.mark.parametrize("script", ["one_machine.sh", "two_and_two.sh"])
def test_scripts_want_a_model(script: str) -> None:
    """Without a model nothing is started."""
    env = {name: value for name, value in os.environ.items() if name != "MODEL"}
    ran = subprocess.run(
        [str(EXAMPLES / script)], env=env, capture_output=True, text=True, timeout=30
    )
    assert ran.returncode != 0
    assert "set MODEL" in ran.stderr


@pytest.mark.timeout(200)
def test_onnx_encoder() -> None:
    """The tower is exported and served, a picture's rows are fetched, and all ends."""
    for needed in ("torch", "transformers", "safetensors", "onnx", "onnxruntime", "blake3"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed; the example says what it needs")
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "onnx-encoder" / "run.py")],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stderr
    assert ": 256 rows of 256\n" in ran.stdout
    assert "vllm serve " in ran.stdout
