# SPDX-License-Identifier: Apache-2.0
"""Starts of an agent that cannot go well, and signals that end it: a sentence and 0, 1 or 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ec_connector.agent.__main__ import least_files
from ec_connector.config import AgentOptions, Settings
from ec_connector.curve import make_keys

SECONDS = 30.0
OPTIONS = AgentOptions(settings=Settings(pool_size=8 << 20))


def start(first: str = ":", stdout: int = subprocess.PIPE, options: AgentOptions = OPTIONS) -> Any:
    """An agent that nobody owns, in a shell's place that did ``first``."""
    agent = subprocess.Popen(
        ["/bin/sh", "-c", f'{first}; exec "$0" -P -m ec_connector.agent', sys.executable],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        # These tests may run under nohup themselves.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert agent.stdin is not None
    agent.stdin.write(options.to_json() + b"\n")
    agent.stdin.flush()
    return agent


@pytest.mark.parametrize("files", [12, 16, 20, 39])
def test_too_few_files(files: int) -> None:
    """Before ZeroMQ ends the process: what is short, what is needed, what to do."""
    agent = start(f"ulimit -n {files}")
    out, err = agent.communicate(timeout=SECONDS)
    assert agent.returncode == 1, err
    assert f"only {files} files" in out.decode()
    assert "raise the limit" in out.decode()
    assert err == b""


@pytest.mark.parametrize("lanes", [1, 2, 16])
def test_just_enough_files(lanes: int, tmp_path: Path) -> None:
    """What is named as needed is enough, with keys and tickets too."""
    make_keys(tmp_path / "keys")
    settings = Settings(
        pool_size=8 << 20,
        lanes=lanes,
        curve_keys=str(tmp_path / "keys"),
        ticket_key=str(tmp_path / "keys" / "ticket_key"),
    )
    options = AgentOptions(settings=settings)
    agent = start(f"ulimit -n {least_files(settings)}", options=options)
    assert b"endpoint" in agent.stdout.readline()
    agent.terminate()
    agent.communicate(timeout=SECONDS)
    assert agent.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_it(number: signal.Signals) -> None:
    """The agent ends in good order, status 0, also when its terminal is closed."""
    agent = start()
    assert b"endpoint" in agent.stdout.readline()
    agent.send_signal(number)
    _, err = agent.communicate(timeout=SECONDS)
    assert agent.returncode == 0
    assert err == b""


def test_nohup() -> None:
    """A hang-up that was to be ignored is."""
    agent = start("trap '' HUP")
    assert b"endpoint" in agent.stdout.readline()
    agent.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        agent.wait(0.5)
    agent.terminate()
    agent.communicate(timeout=SECONDS)
    assert agent.returncode == 0


def test_nowhere_to_say_it() -> None:
    """A full disk under standard output: one sentence, status 1, nothing left running."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        agent = start(stdout=full)
        _, err = agent.communicate(timeout=SECONDS)
    finally:
        os.close(full)
    assert agent.returncode == 1
    assert err.decode().startswith("cannot say where this agent listens")
    assert "Traceback" not in err.decode()


def test_interrupted_start() -> None:
    """Ctrl-C while a large pool is made is no traceback, and no status of a signal."""
    code = """
import sys
from ec_connector.agent import __main__ as main
def interrupted(options):
    raise KeyboardInterrupt
main.Agent = interrupted
sys.exit(main.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=OPTIONS.to_json(), capture_output=True, timeout=SECONDS
    )
    assert done.returncode == 1
    assert b"interrupted before it served" in done.stdout
    assert done.stderr == b""
