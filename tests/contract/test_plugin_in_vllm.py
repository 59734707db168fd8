# SPDX-License-Identifier: Apache-2.0
"""Both ways in which the installed vLLM loads the connector."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.contract,
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SHOW_CLASS = """
from vllm.config.ec_transfer import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
config = ECTransferConfig(ec_connector="ECPoolConnector", ec_role="ec_producer", **OPTIONS)
found = ECConnectorFactory.get_connector_class(config)
print("FOUND", found.__module__, found.__name__)
"""
LOAD_PLUGINS = """
from vllm.plugins import load_general_plugins
load_general_plugins()
"""


def found_by_vllm(code: str, **environment: str) -> str:
    """What vLLM resolves the connector's name to, in a process of its own."""

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            return line.removeprefix("FOUND ")
    return done.stderr.strip().splitlines()[-1]


def test_by_name() -> None:
    """The entry point alone makes the name known: no module path is needed."""
    if "ec_connector" not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        pytest.skip("the package is not installed in this environment")
    found = found_by_vllm(f"OPTIONS = {{}}\n{LOAD_PLUGINS}\n{SHOW_CLASS}")
    assert found == "ec_connector.connector ECPoolConnector"


def test_by_module_path() -> None:
    """With the plugin switched off, the module path still leads to the same class."""
    options = {"ec_connector_module_path": "ec_connector"}
    code = f"OPTIONS = {options!r}\n{LOAD_PLUGINS}\n{SHOW_CLASS}"
    found = found_by_vllm(code, EC_CONNECTOR_DISABLE="1")
    assert found == "ec_connector.connector ECPoolConnector"


def test_switched_off() -> None:
    """With the plugin switched off, vLLM does not know the name."""
    code = f"OPTIONS = {{}}\n{LOAD_PLUGINS}\n{SHOW_CLASS}"
    assert "Unsupported connector type" in found_by_vllm(code, EC_CONNECTOR_DISABLE="1")
