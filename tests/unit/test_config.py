# SPDX-License-Identifier: Apache-2.0
"""The settings: defaults, units, limits, and messages that say what to do."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ec_connector.config import SETTING_KEYS, AgentOptions, Settings
from ec_connector.errors import ConfigError
from ec_connector.protocol.fingerprint import Identity


def refusal(mapping: dict[str, Any]) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        Settings.parse(mapping)
    return str(caught.value)


def test_defaults_make_a_pair_on_one_machine() -> None:
    """Nothing needs to be set: an empty mapping gives the defaults, loopback peers only."""
    settings = Settings.parse({})
    assert settings == Settings()
    assert settings.pool_size == 1 << 30
    assert settings.block_size == 64 << 10
    assert settings.port == 0
    assert settings.planes == ["memory", "zmq"]
    assert settings.allow_peers == ["127.0.0.0/8", "::1"]


def test_units() -> None:
    """Sizes and durations are taken as text or as numbers."""
    settings = Settings.parse(
        {"pool_size": "4GiB", "block_size": 131072, "lease": "2m", "fetch_timeout": 5}
    )
    assert settings.pool_size == 4 << 30
    assert settings.block_size == 128 << 10
    assert settings.num_blocks == 32768
    assert settings.lease == 120.0
    assert settings.fetch_timeout == 5.0


def test_pool_is_whole_blocks() -> None:
    """pool_size is rounded down to whole blocks, never up."""
    settings = Settings.parse({"pool_size": "512MB"})
    assert settings.pool_size % settings.block_size == 0
    assert 0 < 512_000_000 - settings.pool_size < settings.block_size
    assert settings.num_blocks * settings.block_size == settings.pool_size


@pytest.mark.parametrize("key", SETTING_KEYS, ids=lambda key: key.name)
def test_every_key_is_described_and_checked(key: Any) -> None:
    """Each key has a description, survives its own printed default, and refuses a wrong type."""
    assert key.description.endswith(".")
    assert getattr(Settings.parse({key.name: key.written(key.default)}), key.name) == key.default
    for wrong in (None, True, {"a": 1}, b"x"):
        message = refusal({key.name: wrong})
        assert message.startswith(f"{key.name}={wrong!r} is ")
        assert "write" in message


@pytest.mark.parametrize(
    ("mapping", "parts"),
    [
        ({"pool_size": "soon"}, ["pool_size='soon'", "4GiB"]),
        ({"pool_size": 100}, ["pool_size=100", "4KiB"]),
        ({"pool_size": "60KiB"}, ["pool_size=60KiB", "block_size=64KiB", "larger"]),
        ({"block_size": 5000}, ["block_size=5000", "power of two", "4KiB"]),
        ({"block_size": 2048}, ["block_size=2KiB", "4KiB"]),
        ({"window": "4KiB"}, ["window=4KiB", "chunk_size=1MiB", "at least"]),
        ({"port": 65536}, ["port=65536", "0 to 65535"]),
        ({"port": -1}, ["port=-1", "0 to 65535"]),
        ({"port": "80"}, ["port='80'", "whole number"]),
        ({"port": 80.0}, ["port=80.0", "whole number"]),
        ({"max_peers": 0}, ["max_peers=0", "1 to"]),
        ({"fetch_timeout": 0}, ["fetch_timeout=0s", "10ms"]),
        ({"lease": "2d"}, ["lease='2d'", "30s"]),
        ({"bind_host": "tcp://10.0.0.1"}, ["bind_host='tcp://10.0.0.1'", "without"]),
        ({"bind_host": "10.0.0.1:5000"}, ["bind_host='10.0.0.1:5000'", "port has its own key"]),
        ({"bind_host": "999.1.1.1"}, ["bind_host='999.1.1.1'", "neither"]),
        ({"bind_host": "224.0.0.1"}, ["bind_host='224.0.0.1'", "multicast", "advertise_host"]),
        ({"advertise_host": "169.254.169.254"}, ["advertise_host=", "metadata", "reach"]),
        ({"advertise_host": "0.0.0.0"}, ["advertise_host='0.0.0.0'", "wildcard"]),
        ({"planes": "zmq"}, ["planes='zmq'", "list"]),
        ({"planes": []}, ["planes=[]", "memory, zmq"]),
        ({"planes": ["zmq", "zmq"]}, ["planes=['zmq', 'zmq']", "once"]),
        ({"planes": ["rdma"]}, ["'rdma'", "memory, zmq"]),
        ({"allow_peers": ["10.0.0.0/33"]}, ["allow_peers", "10.0.0.0/33"]),
        ({"allow_peers": [1]}, ["allow_peers=[1]", "list of texts"]),
        ({"agent": "localhost"}, ["agent='localhost'", "ipc://"]),
    ],
)
def test_messages_name_key_value_and_remedy(mapping: dict[str, Any], parts: list[str]) -> None:
    """A refused value is named with its key and with what may stand there instead."""
    message = refusal(mapping)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("pol_size", "did you mean 'pool_size'?"),
        ("block-size", "did you mean 'block_size'?"),
        ("Fetch_Timeout", "did you mean 'fetch_timeout'?"),
        ("ec_cpu_bytes", "'pool_size'"),
        ("num_blocks", "'pool_size'"),
        ("buffer_size", "'pool_size'"),
        ("ec_enable_nixl", "'planes'"),
        ("ec_ip", "beside ec_connector"),
        ("ec_connector_extra_config", "only what stands in it"),
        ("engine_id", "beside ec_connector"),
        ("xyz", "the keys are pool_size, block_size"),
        (7, "unknown key 7"),
    ],
)
def test_unknown_keys(name: Any, part: str) -> None:
    """An unknown key is refused, never ignored, and the nearest right one is named."""
    message = refusal({name: "1"})
    assert message.startswith(f"unknown key {name!r}")
    assert part in message


def test_keys_of_a_running_agent_are_not_ignored() -> None:
    """With a running agent, what belongs to that agent is refused here; the engine's own is not."""
    message = refusal({"agent": "ipc://@ec", "pool_size": "2GiB", "port": 5000})
    assert message.startswith("pool_size, port cannot be set together with agent")
    settings = Settings.parse({"agent": "ipc://@ec", "fetch_timeout": "3s"})
    assert settings.agent == "ipc://@ec"
    assert settings.fetch_timeout == 3.0


def test_wildcard_bind_needs_no_advertised_address() -> None:
    """A wildcard to listen on is fine; what to announce is found out later."""
    for host in ("0.0.0.0", "::", "*"):
        assert Settings.parse({"bind_host": host}).bind_host == host


def test_settings_cannot_change() -> None:
    """A setting read once stays what it was checked to be."""
    with pytest.raises(AttributeError):
        Settings().port = 1  # type: ignore[misc]


def test_replace_checks_again() -> None:
    """Values set past the parser are held to the same limits."""
    with pytest.raises(ConfigError, match="window"):
        msgspec.structs.replace(Settings(), window=4096)


def test_json_round_trip() -> None:
    """Settings survive the way to the agent."""
    settings = Settings.parse({"pool_size": "2GiB", "lease": "90s", "allow_peers": ["10.0.0.0/8"]})
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("text", "part"),
    [("{", "not JSON"), ("[1]", "list"), ('{"port": 1.5}', "port=1.5"), ("\xff", "not JSON")],
)
def test_bad_json(text: str, part: str) -> None:
    """Unreadable settings are a ConfigError like any other."""
    with pytest.raises(ConfigError, match=part):
        Settings.from_json(text)


def test_agent_options_round_trip() -> None:
    """What an agent is told arrives whole and on one line."""
    options = AgentOptions(
        settings=Settings.parse({"pool_size": "1MiB"}),
        identity=Identity("ab" * 32, {"model": "acme/tiny-vl"}),
        owner_pid=17,
        log_level="DEBUG",
    )
    text = options.to_json()
    assert b"\n" not in text
    assert AgentOptions.from_json(text) == options


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"owner_pid": -1}, "owner_pid=-1"),
        ({"log_level": "LOUD"}, "DEBUG, INFO"),
        ({"settings": {"port": 70000}}, "port=70000"),
        ({"settings": {"port": "70"}}, "port"),
        ({"identity": 3}, "identity"),
    ],
)
def test_bad_agent_options(change: dict[str, Any], part: str) -> None:
    """An agent refuses options that it cannot mean, as ConfigError."""
    options = json.loads(AgentOptions(settings=Settings()).to_json()) | change
    with pytest.raises(ConfigError, match=part):
        AgentOptions.from_json(json.dumps(options))
