# SPDX-License-Identifier: Apache-2.0
"""Registration with vLLM's connector factory, against a stand-in for the factory."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest

from ec_connector import plugin

FACTORY_MODULE = "vllm.distributed.ec_transfer.ec_connector.factory"


class FakeFactory:
    """Keeps names as vLLM's factory does, and refuses a name twice as it does."""

    def __init__(self, *taken: str) -> None:
        self.entries = dict.fromkeys(taken, ("elsewhere", "Elsewhere"))

    def register_connector(self, name: str, module_path: str, class_name: str) -> None:
        if name in self.entries:
            raise ValueError(f"Connector '{name}' is already registered.")
        self.entries[name] = (module_path, class_name)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which nothing was registered yet."""
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.delenv("EC_CONNECTOR_DISABLE", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, factory: object) -> None:
    """Make ``factory`` what the plugin finds in vLLM."""
    module = ModuleType(FACTORY_MODULE)
    module.ECConnectorFactory = factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, FACTORY_MODULE, module)


def test_registers_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factory gets a name and a path; the connector is not imported for it."""
    factory = FakeFactory()
    install(monkeypatch, factory)
    plugin.register()
    assert factory.entries == {"ECPoolConnector": ("ec_connector.connector", "ECPoolConnector")}


def test_is_idempotent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM may load plugins more than once in a process; that is no event."""
    factory = FakeFactory()
    install(monkeypatch, factory)
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            plugin.register()
    assert list(factory.entries) == ["ECPoolConnector"]
    assert not caplog.records


def test_yields_to_a_name_already_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another connector of that name stays, and one line says so."""
    factory = FakeFactory("ECPoolConnector")
    install(monkeypatch, factory)
    plugin.register()
    assert factory.entries["ECPoolConnector"] == ("elsewhere", "Elsewhere")
    assert [record.name for record in caplog.records] == ["vllm.ec_connector.plugin"]
    assert "already registered" in caplog.text


def test_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """EC_CONNECTOR_DISABLE=1 makes the plugin a no-op; 0 does not."""
    factory = FakeFactory()
    install(monkeypatch, factory)
    monkeypatch.setenv("EC_CONNECTOR_DISABLE", "1")
    plugin.register()
    assert not factory.entries
    monkeypatch.setenv("EC_CONNECTOR_DISABLE", "0")
    plugin.register()
    assert factory.entries


@pytest.mark.parametrize(
    "factory", [None, object(), type("Old", (), {"register_connector": lambda name: None})]
)
def test_never_raises_on_an_unsuited_vllm(
    factory: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No module, no method or another signature: one log line, and the engine starts."""
    if factory is None:
        monkeypatch.setitem(sys.modules, FACTORY_MODULE, None)  # type: ignore[arg-type]
    else:
        install(monkeypatch, factory)
    plugin.register()
    assert len(caplog.records) == 1
    assert "ECPoolConnector" in caplog.text
