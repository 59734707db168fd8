# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks, on this host and on broken ones."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path

import pytest

from ec_connector.agent.process import AgentProcess
from ec_connector.cli import checks, doctor
from ec_connector.cli.vllm_probe import NEEDED_HOOKS, find_vllm, probe
from ec_connector.config import AgentOptions, Settings
from ec_connector.curve import make_keys
from ec_connector.errors import RegionError
from ec_connector.pool.memory import Room


def finding(check: str, **settings: object) -> doctor.Finding:
    """One check's outcome under these settings."""
    found = {item.check: item for item in doctor.examine(Settings.parse(settings))}
    return found[check]


def test_this_host_is_good() -> None:
    """Where these tests run, the connector runs: memory sharing, process watching, a port."""
    found = {item.check: item for item in doctor.examine(Settings.parse({"pool_size": "1MiB"}))}
    for check in ("python", "libraries", "process watching", "shared memory", "pool size"):
        assert found[check].status == doctor.GOOD, found[check]
    assert found["address"].status == doctor.GOOD, found["address"]


def test_pool_beyond_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool larger than what can be had is a problem that names both figures."""
    monkeypatch.setattr(checks, "memory_room", lambda: Room(1 << 30, "this host", "free"))
    bad = finding("pool size", pool_size="2GiB")
    assert bad.status == doctor.PROBLEM
    assert "2GiB" in bad.text
    assert "1.0GiB (this host)" in bad.text
    monkeypatch.setattr(checks, "memory_room", lambda: None)
    assert finding("pool size", pool_size="2GiB").status == doctor.NOTE


def test_pool_of_a_running_agent_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a running agent the pool is made already."""
    monkeypatch.setattr(checks, "memory_room", lambda: Room(1, "this host", "free"))
    assert finding("pool size", agent="ipc://@ec").status == doctor.NOTE


def test_port_in_use() -> None:
    """A port that somebody listens on is a problem; the message says what to change."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        bad = finding("address", port=port)
    assert bad.status == doctor.PROBLEM
    assert str(port) in bad.text
    assert "change bind_host or port" in bad.text


def test_address_of_another_host() -> None:
    """An address that this host does not have cannot be listened on (192.0.2.0/24 is nobody's)."""
    assert finding("address", bind_host="192.0.2.1").status == doctor.PROBLEM


@pytest.mark.parametrize("host", ["", "0.0.0.0", "*", "localhost"])
def test_addresses_that_can_be_bound(host: str) -> None:
    """Loopback, wildcards and names are bound as given."""
    assert finding("address", bind_host=host).status == doctor.GOOD


def test_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without pidfd is a problem: the agent could outlive its engine."""

    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert finding("process watching").status == doctor.PROBLEM


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region that cannot be made or mapped elsewhere is a problem with the cause."""

    def refuse(nbytes: int, block_bytes: int) -> None:
        raise RegionError("no memory file can be made")

    with monkeypatch.context() as patch:
        patch.setattr(checks.Region, "create", refuse)
        bad = finding("shared memory")
    assert bad.status == doctor.PROBLEM
    assert bad.text == "no memory file can be made"
    monkeypatch.setattr(checks, "_MAP_FROM_CHILD", "import sys; sys.exit('not permitted')")
    bad = finding("shared memory")
    assert bad.status == doctor.PROBLEM
    assert "not permitted" in bad.text
    monkeypatch.setattr(checks, "_MAP_FROM_CHILD", "")
    assert "not seen here" in finding("shared memory").text


def test_plugin_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches that keep vLLM from loading the plugin are pointed out."""
    monkeypatch.delenv("EC_CONNECTOR_DISABLE", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if finding("plugin").status != doctor.GOOD:
        pytest.skip("the package is not installed in this environment")
    monkeypatch.setenv("VLLM_PLUGINS", "gguf")
    assert "VLLM_PLUGINS='gguf'" in finding("plugin").text
    monkeypatch.setenv("VLLM_PLUGINS", "gguf,ec_connector")
    assert finding("plugin").status == doctor.GOOD
    monkeypatch.setenv("EC_CONNECTOR_DISABLE", "1")
    assert finding("plugin").status == doctor.NOTE


def test_old_vllm_is_named(tmp_path: Path) -> None:
    """A vLLM without a hook, or without EC connectors, is found by its source."""
    assert probe(tmp_path, "0.11.0").missing_hooks == NEEDED_HOOKS
    base = tmp_path / "distributed" / "ec_transfer" / "ec_connector" / "base.py"
    base.parent.mkdir(parents=True)
    methods = "".join(f"    def {hook}(self): ...\n" for hook in NEEDED_HOOKS[1:])
    base.write_text(f"class ECConnectorBase:\n{methods}")
    assert probe(tmp_path, "0.29.0").missing_hooks == NEEDED_HOOKS[:1]


@pytest.mark.contract
def test_installed_vllm_has_every_hook() -> None:
    """The vLLM we develop against offers all that we rely on."""
    vllm = find_vllm()
    if vllm is None:
        pytest.skip("vLLM is not installed")
    assert vllm.missing_hooks == ()


def test_beyond_this_host_without_keys(tmp_path: Path) -> None:
    """A port that others reach is a problem without keys, and none with them."""
    bad = finding("who may connect", bind_host="0.0.0.0")
    assert bad.status == doctor.PROBLEM
    assert "ec-connector keygen" in bad.text
    assert finding("who may connect", bind_host="::1").status == doctor.GOOD
    make_keys(tmp_path / "keys")
    keys = str(tmp_path / "keys")
    good = finding("who may connect", bind_host="0.0.0.0", curve_keys=keys)
    assert good.status == doctor.GOOD
    assert "serves 1 client keys and may fetch" in good.text
    bad = finding("who may connect", curve_keys=keys, curve_allow=str(tmp_path / "none"))
    assert bad.status == doctor.PROBLEM
    assert "curve_allow" in bad.text
    nobody = tmp_path / "nobody"
    nobody.mkdir()
    (nobody / "README").write_text("keys go here")
    bad = finding("who may connect", curve_keys=keys, curve_allow=str(nobody))
    assert bad.status == doctor.PROBLEM
    assert f"curve_allow={str(nobody)!r}" in bad.text
    assert finding("who may connect", agent="ipc://@ec").status == doctor.NOTE


def test_codecs_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is used, and said; nothing left is a problem, with what to install."""
    assert finding("codecs").status == doctor.GOOD
    lossy = finding("codecs", codecs=["lossy-int8-rows", "none"])
    assert (lossy.status, "lossy-int8-rows" in lossy.text) == (doctor.GOOD, True)
    assert finding("codecs", agent="ipc://@ec").status == doctor.NOTE
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert finding("codecs", codecs=["zstd", "none"]) == doctor.Finding(
        "codecs", doctor.NOTE, "none; without zstd: pip install 'ec-connector[zstandard]'"
    )
    bad = finding("codecs", codecs=["zstd"])
    assert (bad.status, "ec-connector[zstandard]" in bad.text) == (doctor.PROBLEM, True)


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that no agent starts with is a problem, one below max_peers is worth knowing."""
    for limit, status in ((16, doctor.PROBLEM), (1024, doctor.NOTE), (4096, doctor.GOOD)):
        monkeypatch.setattr(checks.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        found = finding("open files")
        assert found.status == status, limit
        assert str(limit) in found.text


def test_a_running_agent_is_met() -> None:
    """agent= is good only where one answers."""
    bad = finding("address", agent="ipc://@ec-connector-nobody")
    assert bad.status == doctor.PROBLEM
    assert "no agent answers" in bad.text
    options = AgentOptions(settings=Settings(pool_size=8 << 20), owner_pid=os.getpid())
    running = AgentProcess(options)
    try:
        good = finding("address", agent=running.endpoint)
    finally:
        running.stop()
    assert good.status == doctor.GOOD
