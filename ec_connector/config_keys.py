# SPDX-License-Identifier: Apache-2.0
"""How one setting is described, read from configuration and checked against its limits."""

from __future__ import annotations

from typing import Any

import msgspec

from ec_connector.errors import ConfigError
from ec_connector.units import format_duration, format_size, parse_duration, parse_size

VLLM_FIELDS = frozenset(
    {"ec_connector", "ec_connector_module_path", "ec_ip", "ec_port", "ec_role", "engine_id"}
)

KEYS_OF_OTHERS = {
    "ec_connector_extra_config": "give only what stands in it",
    "buffer_size": "the memory for encoder outputs is 'pool_size'",
    "ec_buffer_size": "the memory for encoder outputs is 'pool_size'",
    "ec_cpu_bytes": "the memory for encoder outputs is 'pool_size'",
    "num_blocks": "the pool is sized in bytes by 'pool_size' (and 'block_size')",
    "num_cpu_blocks": "the pool is sized in bytes by 'pool_size' (and 'block_size')",
    "ec_enable_nixl": "there is no NIXL here; 'planes' says how the bytes travel",
    "backends": "'planes' says how the bytes travel",
    "protocol": "'planes' says how the bytes travel",
    "shared_storage_path": "no shared folder is needed; leave it out",
    "host": "the address to listen on is 'bind_host', the announced one 'advertise_host'",
    "ip": "the address to listen on is 'bind_host', the announced one 'advertise_host'",
    "side_channel_host": "the address to listen on is 'bind_host'",
    "side_channel_port": "the port to listen on is 'port'",
    "timeout": "how long to wait for an item is 'fetch_timeout'",
    "ttl": "how long a peer may hold an item is 'lease'",
    "allowlist": "which peers may be dialled is 'allow_peers'",
}
"""Names that operators of other connectors try, and what to use instead."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One setting. ``agent``: it is the agent's, not the engine's side of it."""

    name: str
    kind: str
    default: Any
    description: str
    agent: bool
    low: float = 0
    high: float = 0

    def written(self, value: Any) -> Any:
        """A value as it would be written in configuration."""
        if self.kind == "size":
            return format_size(value)
        if self.kind == "duration":
            return format_duration(value)
        return value

    def check_range(self, value: Any) -> None:
        """Raises ConfigError when the value lies outside the limits."""
        if self.high and not self.low <= value <= self.high:
            raise ConfigError(
                f"{self.name}={self.written(value)} is out of range; choose a value from "
                f"{self.written(self.low)} to {self.written(self.high)}"
            )


def keys_of(settings: type[msgspec.Struct]) -> tuple[Key, ...]:
    """The keys that a struct's annotated fields describe."""
    keys = []
    for field in msgspec.inspect.type_info(settings).fields:  # type: ignore[attr-defined]
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        keys.append(
            Key(
                name=field.name,
                default=default,
                description=field.type.extra_json_schema["description"],
                **field.type.extra,
            )
        )
    return tuple(keys)


def read_value(key: Key, value: object) -> Any:
    """A value as the field holds it, from what stands in configuration.

    Raises:
        ConfigError: of another type, or not readable as what the key wants.
    """
    try:
        return _READERS[key.kind](value)
    except ValueError as error:
        raise ConfigError(f"{key.name}={value!r} {error}") from None


def _read_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"is {type(value).__name__}; write a whole number")
    return value


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"is {type(value).__name__}; write text in quotes")
    return value


def _read_texts(value: object) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError('is not a list of texts; write for example ["one", "two"]')
    return list(value)


_READERS = {
    "count": _read_count,
    "duration": parse_duration,
    "size": parse_size,
    "text": _read_text,
    "texts": _read_texts,
}
