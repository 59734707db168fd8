# SPDX-License-Identifier: Apache-2.0
"""What an import pulls in: each case runs in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ec_connector

HEAVY = ("numpy", "torch", "vllm", "zmq")


def loaded_by(statement: str) -> set[str]:
    """Which of the heavy packages are loaded after running a statement."""
    code = f"import sys\n{statement}\nprint(*({HEAVY!r} & sys.modules.keys()))".replace(
        f"{HEAVY!r}", f"{set(HEAVY)!r}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "ec_connector",
        "ec_connector.config",
        "ec_connector.errors",
        "ec_connector.plugin",
        "ec_connector.pool.blocks",
        "ec_connector.protocol.fingerprint",
        "ec_connector.protocol.local",
        "ec_connector.protocol.messages",
        "ec_connector.proxy",
    ],
)
def test_light(module: str) -> None:
    """vLLM imports the plugin in all its processes, so this costs next to nothing."""
    assert loaded_by(f"import {module}") == set()


@pytest.mark.parametrize(
    "module", ["ec_connector.agent.__main__", "ec_connector.cli", "ec_connector.library"]
)
def test_no_tensor_library(module: str) -> None:
    """The agent, the clients and the command work where neither torch nor vLLM exists."""
    assert not loaded_by(f"import {module}") & {"torch", "vllm"}


def test_an_agent_does_without_numpy() -> None:
    """Until something is packed; it is most of what an agent would hold."""
    assert loaded_by("import ec_connector.agent.__main__") == {"zmq"}


def test_registering_without_vllm_loads_nothing() -> None:
    """Where vLLM is absent the entry point tries, says so, and leaves nothing behind."""
    statement = "sys.modules['vllm'] = None\nfrom ec_connector.plugin import register\nregister()"
    assert loaded_by(f"{statement}\ndel sys.modules['vllm']") == set()


def test_public_names_are_listed() -> None:
    """dir() shows the lazy names, so that help and completion find them."""
    assert {"Consumer", "ECPoolConnector", "Producer", "__version__"} <= set(dir(ec_connector))


def test_unknown_name_is_an_attribute_error() -> None:
    """The lazy lookup behaves like a module's own for a name it does not have."""
    with pytest.raises(AttributeError, match="has no attribute 'Proucer'"):
        _ = ec_connector.Proucer
