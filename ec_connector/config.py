# SPDX-License-Identifier: Apache-2.0
"""The settings: the keys of ``ec_connector_extra_config``, and of ``Producer`` and ``Consumer``.

Each key is one field of :class:`Settings`; its type, default, limits and
description stand there and nowhere else. ``ec_ip``, ``ec_port``, ``engine_id``
and ``ec_role`` are vLLM's own and stand beside ``ec_connector``, not here.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from ec_connector.codecs.choice import check_codecs
from ec_connector.config_keys import KEYS_OF_OTHERS, VLLM_FIELDS, Key, keys_of, read_value
from ec_connector.errors import ConfigError
from ec_connector.protocol.account import LOOPBACK
from ec_connector.protocol.addresses import DEFAULT_ALLOW, AllowList, always_refused, is_host_name
from ec_connector.protocol.fingerprint import Identity
from ec_connector.units import format_size

KNOWN_PLANES = ("memory", "zmq")
WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", "*"})  # noqa: S104 - compared with, not bound
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_LINK = re.compile(r"[A-Za-z0-9_.-]{1,32}", re.ASCII)

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
PAGE = 4 * KiB


def _size(low: int, high: int, text: str, *, agent: bool = True) -> Meta:
    return Meta(description=text, extra={"kind": "size", "low": low, "high": high, "agent": agent})


def _duration(low: float, high: float, text: str, *, agent: bool = True) -> Meta:
    extra = {"kind": "duration", "low": low, "high": high, "agent": agent}
    return Meta(description=text, extra=extra)


def _count(low: int, high: int, text: str) -> Meta:
    return Meta(description=text, extra={"kind": "count", "low": low, "high": high, "agent": True})


def _text(text: str, *, agent: bool = True) -> Meta:
    return Meta(description=text, extra={"kind": "text", "agent": agent})


def _texts(text: str) -> Meta:
    return Meta(description=text, extra={"kind": "texts", "agent": True})


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one engine's connector, checked. Sizes in bytes, durations in seconds.

    ``pool_size`` is rounded down to whole blocks. Raises ConfigError when a
    value is out of range or contradicts another.
    """

    pool_size: Annotated[
        int, _size(PAGE, 64 * TiB, "Memory for encoder outputs, rounded down to whole blocks.")
    ] = GiB
    block_size: Annotated[
        int,
        _size(PAGE, GiB, "Unit of allocation in the pool: a power of two, 4KiB or more."),
    ] = 64 * KiB
    bind_host: Annotated[
        str, _text("Address that peers are accepted on. Empty: vLLM's ec_ip, 127.0.0.1 by default.")
    ] = ""
    advertise_host: Annotated[
        str,
        _text(
            "Address announced to peers. Empty: bind_host, or this host's own address when "
            "bind_host is a wildcard."
        ),
    ] = ""
    port: Annotated[
        int,
        _count(
            0,
            65535,
            "TCP port for peers, used exactly as given. 0: a free one, which is announced.",
        ),
    ] = 0
    fetch_timeout: Annotated[
        float,
        _duration(
            0.01,
            3600,
            "How long a consumer waits for an item before it encodes it or fails the request.",
            agent=False,
        ),
    ] = 10.0
    connect_timeout: Annotated[
        float,
        _duration(0.01, 600, "A peer not connected for this long fails what is fetched from it."),
    ] = 2.0
    lease: Annotated[
        float,
        _duration(0.1, 86400, "How long a silent peer may keep an item from being evicted."),
    ] = 30.0
    chunk_size: Annotated[
        int, _size(PAGE, GiB, "Payload bytes of one message on the zmq plane.")
    ] = MiB
    window: Annotated[
        int,
        _size(
            PAGE,
            256 * MiB,
            "Payload bytes of a transfer under way at first; grows with the link. "
            "chunk_size or more.",
        ),
    ] = 8 * MiB
    lanes: Annotated[
        int, _count(1, 16, "Connections to one busy peer on the zmq plane, and I/O threads.")
    ] = 2
    planes: Annotated[
        list[str], _texts("Ways for the bytes to travel, best first. Known: memory, zmq.")
    ] = msgspec.field(default_factory=lambda: ["memory", "zmq"])
    codecs: Annotated[
        list[str],
        _texts(
            "Ways to make payload smaller on the zmq plane, best first; the producer takes the "
            "first that it has too. Known: none, zstd, lz4, lossy-int8-rows."
        ),
    ] = msgspec.field(default_factory=lambda: ["none"])
    allow_peers: Annotated[
        list[str],
        _texts("Hosts, addresses or CIDR ranges (with an optional :port) that may be dialled."),
    ] = msgspec.field(default_factory=lambda: list(DEFAULT_ALLOW))
    curve_keys: Annotated[
        str,
        _text(
            "Directory of keys made by ec-connector keygen. With it peers are encrypted and must "
            "prove a key; empty: neither."
        ),
    ] = ""
    curve_allow: Annotated[
        str,
        _text(
            "File or directory (*.key) of public client keys that may connect. Empty: client.key "
            "of curve_keys. Read again when it changes."
        ),
    ] = ""
    ticket_key: Annotated[
        str,
        _text(
            "File of the fleet's ticket key (keygen makes one). With it announcements are signed, "
            "and only what is signed is dialled and served; allow_peers, left out, allows it all.",
            agent=False,
        ),
    ] = ""
    link: Annotated[
        str,
        _text(
            "What links to other hosts are called in the books: lan, wan, rack-7. Transfers within "
            "this host are booked as loopback."
        ),
    ] = "lan"
    max_peers: Annotated[int, _count(1, 65536, "Peers connected at one time.")] = 256
    max_parked: Annotated[
        int, _count(1, 1 << 20, "Requests that may wait for saves; peers share them evenly.")
    ] = 4096
    proxy_url: Annotated[
        str,
        _text("Router (http://host:port) at which this engine registers, and leaves. Empty: none."),
    ] = ""
    http_url: Annotated[
        str, _text("Where that router reaches this engine's own HTTP server: http://host:port.")
    ] = ""
    proxy_token: Annotated[
        str, _text("File of the token that the router wants of those that register.")
    ] = ""
    agent: Annotated[
        str,
        _text("Endpoint (ipc://...) of a running agent to use. Empty: start one.", agent=False),
    ] = ""

    def __post_init__(self) -> None:
        for key in SETTING_KEYS:
            key.check_range(getattr(self, key.name))
        _check_blocks(self.pool_size, self.block_size)
        force_setattr(self, "pool_size", self.pool_size // self.block_size * self.block_size)
        if self.window < self.chunk_size:
            raise ConfigError(
                f"window={format_size(self.window)} is smaller than chunk_size="
                f"{format_size(self.chunk_size)}, so no chunk could be sent; "
                f"make window at least chunk_size"
            )
        for name in ("bind_host", "advertise_host"):
            _check_host(name, getattr(self, name))
        if self.advertise_host in WILDCARD_HOSTS:
            raise ConfigError(
                f"advertise_host={self.advertise_host!r} is a wildcard that no peer can dial; "
                f"give this host's own address or name, or leave it empty"
            )
        name = "advertise_host" if self.advertise_host else "bind_host"
        announced = getattr(self, name)
        if announced not in WILDCARD_HOSTS and (kind := always_refused(announced)):
            raise ConfigError(
                f"{name}={announced!r} would be announced to peers, and {kind} address is never "
                "dialled; set advertise_host to an address or name that peers can reach"
            )
        _check_planes(self.planes)
        _check_link(self.link)
        check_codecs(self.codecs)
        AllowList.parse(self.allow_peers)
        if self.curve_allow and not self.curve_keys:
            raise ConfigError(
                f"curve_allow={self.curve_allow!r} says who may connect, but without curve_keys "
                "nobody has to prove who it is; set curve_keys too, or leave both out"
            )
        _check_registration(self.proxy_url, self.http_url, self.proxy_token)
        if self.agent and not self.agent.startswith("ipc://"):
            raise ConfigError(
                f"agent={self.agent!r} is not an endpoint; give the ipc://... text that the "
                f"agent printed at its start, or leave it empty to start one"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.pool_size // self.block_size

    @classmethod
    def parse(cls, mapping: Mapping[str, Any]) -> Settings:
        """Settings from configuration as people write it (``"4GiB"``, ``"30s"``).

        Raises:
            ConfigError: names the key, the value and what to do.
        """
        known = {key.name: key for key in SETTING_KEYS}
        values = {}
        for name, value in mapping.items():
            if name not in known:
                raise ConfigError(_unknown(name, list(known)))
            values[name] = read_value(known[name], value)
        settings = cls(**values)
        if settings.agent:
            _check_left_to_agent(known[name] for name in values)
        return settings

    def to_json(self) -> bytes:
        """All settings as a JSON object that :meth:`from_json` reads."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> Settings:
        """Settings from a JSON object as :meth:`parse` takes it. Raises ConfigError."""
        try:
            mapping = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise ConfigError(f"the settings are not JSON: {error}") from error
        if not isinstance(mapping, dict):
            raise ConfigError(
                f"the settings are a JSON {type(mapping).__name__}; write an object, "
                f'for example {{"pool_size": "4GiB"}}'
            )
        return cls.parse(mapping)


SETTING_KEYS: tuple[Key, ...] = keys_of(Settings)
"""Every key with its default, limits and description, in the order of the fields."""


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent process is told at its start, as JSON on its standard input.

    ``owner_pid`` is the process with which it ends; 0: it runs on its own. ``serves`` is what a
    router may ask of the owner: ``"encode"``, ``"decode"``, both or nothing.
    """

    settings: Settings
    identity: Identity = Identity()
    owner_pid: int = 0
    serves: tuple[str, ...] = ()
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if self.owner_pid < 0:
            raise ConfigError(f"owner_pid={self.owner_pid} is not a process; give a pid, or 0")
        if self.settings.proxy_url and not self.serves:
            raise ConfigError(
                f"proxy_url={self.settings.proxy_url!r}: an agent alone serves no HTTP requests; "
                "leave it out here, engines register through the agents that they start"
            )
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(
                f"log_level={self.log_level!r} is unknown; use one of {', '.join(LOG_LEVELS)}"
            )

    def to_json(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> AgentOptions:
        """Raises ConfigError when the text is not an agent's options."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"the agent's options are unreadable: {error}") from error


def _check_blocks(pool_size: int, block_size: int) -> None:
    if block_size & (block_size - 1):
        raise ConfigError(
            f"block_size={format_size(block_size)} is not a power of two; use for example "
            f"{format_size(1 << (block_size.bit_length() - 1))}"
        )
    if pool_size < block_size:
        raise ConfigError(
            f"pool_size={format_size(pool_size)} is smaller than one block "
            f"(block_size={format_size(block_size)}); "
            f"make the pool larger or its blocks smaller"
        )


def _check_host(name: str, host: str) -> None:
    if host in WILDCARD_HOSTS or not host:
        return
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not is_host_name(host):
            raise ConfigError(
                f"{name}={host!r} is neither an IP address nor a host name; give it without "
                f"scheme, brackets or port (the port has its own key)"
            ) from None


def _check_link(link: str) -> None:
    if not _LINK.fullmatch(link) or link == LOOPBACK:
        raise ConfigError(
            f"link={link!r} is no name for a link; use 1 to 32 letters, digits, dots, dashes or "
            f"underscores, and not {LOOPBACK}, which is what transfers within a host are called"
        )


def _check_registration(proxy_url: str, http_url: str, proxy_token: str) -> None:
    given = {"proxy_url": proxy_url, "http_url": http_url, "proxy_token": proxy_token}
    missing = [name for name, value in given.items() if not value]
    if missing and len(missing) < len(given):
        raise ConfigError(
            f"{' and '.join(sorted(set(given) - set(missing)))} without {' and '.join(missing)}: "
            "to register at a router all three are needed, for none leave all out"
        )
    for name, url in (("proxy_url", proxy_url), ("http_url", http_url)) if not missing else ():
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname)
            usable = usable and parts.port != 0 and not (parts.query or parts.fragment)
            usable = usable and not (parts.path.strip("/") or parts.username or parts.password)
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(
                f"{name}={url!r} is not a server's root, such as http://10.0.0.7:8000"
            )


def _check_planes(planes: Sequence[str]) -> None:
    for plane in planes:
        if plane not in KNOWN_PLANES:
            raise ConfigError(
                f"planes={list(planes)} names {plane!r}, which is unknown; "
                f"use any of {', '.join(KNOWN_PLANES)}"
            )
    if not planes or len(set(planes)) != len(planes):
        raise ConfigError(
            f"planes={list(planes)} must name one or more ways, each once; "
            f"use any of {', '.join(KNOWN_PLANES)}"
        )


def _check_left_to_agent(given: Any) -> None:
    misplaced = sorted(key.name for key in given if key.agent)
    if misplaced:
        raise ConfigError(
            f"{', '.join(misplaced)} cannot be set together with agent: the running agent has "
            f"its own; set it there, or leave agent out to start one"
        )


def _unknown(name: object, known: list[str]) -> str:
    """Why a key is refused, and which was probably meant."""
    text = f"unknown key {name!r}"
    if name in VLLM_FIELDS:
        return f"{text}: it is vLLM's own; put it beside ec_connector in --ec-transfer-config"
    folded = str(name).lower().replace("-", "_")
    if folded in KEYS_OF_OTHERS:
        return f"{text}: {KEYS_OF_OTHERS[folded]}"
    near = difflib.get_close_matches(folded, known, n=1, cutoff=0.6)
    if near:
        return f"{text}: did you mean {near[0]!r}?"
    return f"{text}: the keys are {', '.join(known)}"
