# SPDX-License-Identifier: Apache-2.0
"""Which peer addresses may be dialled.

An address arrives in the body of a client's request, so it is hostile until it is
found on the operator's list (``allow_peers``). Names are resolved by the caller, who
then dials one of the addresses that were checked here and never the name again: a
name that resolves differently a moment later changes nothing.

========================  ==========================================================
entry                     allows
========================  ==========================================================
``10.0.0.0/8``            every address of the network, any port
``10.0.0.5``              that address, any port
``10.0.0.5:14579``        that address and port; so too ``10.0.0.0/8:14579``
``fd00::/8``              as for IPv4; with a port: ``[fd00::/8]:14579``
``encoder-0.svc``         that name, whatever unicast address it stands for
``*.pool.svc``            every name that ends in ``.pool.svc``
``*``                     every unicast address: anybody who can send a request can
                          make this process dial any host and port it can reach
========================  ==========================================================

Refused whatever the list says: link-local, cloud metadata services, multicast,
broadcast, unspecified, each of these in an IPv6 notation for an IPv4 address, and
port 0.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ec_connector.errors import ConfigError, PeerRefusedError

DEFAULT_ALLOW: tuple[str, ...] = ("127.0.0.0/8", "::1")
"""What an empty list means: loopback only."""

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_HOST_CHARS = 253
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
# Resolvers read "127.1", "0x7f000001" and "2130706433" as addresses.
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.ASCII)
_BRACKETED = re.compile(r"\[(?P<host>[^\[\]]*)\](?::(?P<port>.*))?", re.DOTALL)

_NEVER: tuple[tuple[str, tuple[_Network, ...]], ...] = tuple(
    (kind, tuple(ipaddress.ip_network(text) for text in networks))
    for kind, networks in (
        # Before link-local, in which some of them lie, for the better name.
        (
            "a cloud metadata",
            (
                "169.254.169.254",
                "169.254.170.2",
                "100.100.100.200",
                "168.63.129.16",
                "192.0.0.192",
                "fd00:ec2::254",
                "fd00:ec2::23",
                "fd20:ce::254",
                "fd00:42::42",
            ),
        ),
        ("a link-local", ("169.254.0.0/16", "fe80::/10")),
        ("a multicast", ("224.0.0.0/4", "ff00::/8")),
        ("the broadcast", ("255.255.255.255",)),
        ("an unspecified", ("0.0.0.0/8", "::")),
    )
)
_NAT64 = tuple(ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48"))
_IPV4_COMPATIBLE = ipaddress.IPv6Network("::/96")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")


@dataclass(frozen=True, slots=True)
class _Rule:
    """One entry. ``port`` None: any. Without ``network`` and ``name``: any address."""

    network: _Network | None = None
    name: str = ""  # with a leading dot: every name under it
    port: int | None = None

    def allows_name(self, name: str) -> bool:
        """Whether the entry vouches for ``name`` itself, whatever it resolves to."""
        if self.network is not None:
            return False
        if self.name.startswith("."):
            return name.endswith(self.name)
        return self.name in ("", name)

    def allows_address(self, address: _Address) -> bool:
        return not self.name and (self.network is None or address in self.network)


@dataclass(frozen=True, slots=True)
class AllowList:
    """The operator's list of peers that may be dialled. Make one with :meth:`parse`."""

    entries: tuple[str, ...]
    _rules: tuple[_Rule, ...]

    @classmethod
    def parse(cls, entries: Sequence[str]) -> AllowList:
        """The list for these ``allow_peers`` entries; none at all means loopback only.

        Raises:
            ConfigError: an entry is not an address, network, name or ``*``, or it
                could only ever allow what is always refused.
        """
        chosen = tuple(entries) or DEFAULT_ALLOW
        return cls(chosen, tuple(_parse_entry(entry) for entry in chosen))

    def check_name(self, host: str, port: int) -> None:
        """Refuse a host name before it is looked up, if no answer could make it allowed.

        Clients choose the names, and each lookup is a query that they have this host send.

        Raises:
            PeerRefusedError: no name, or none that an entry allows or could allow.
        """
        shown = f"{_short(host)} port {_short(port)}"
        name = _name(host)
        if not name or not 0 < port <= 0xFFFF:
            raise PeerRefusedError(
                f"peer {shown} is refused and is not looked up: not a host name, or no port"
            )
        local = name == "localhost" or name.endswith(".localhost")
        for rule in self._rules:
            if rule.port in (None, port) and (
                rule.allows_name(name)
                or (rule.network is not None and (local or not rule.network.is_loopback))
            ):
                return
        raise PeerRefusedError(
            f"peer {shown} is not in allow_peers ({self._summary()}) and is not looked up; "
            f"if it is one of yours, add its name or its network there"
        )

    def check(self, host: str, port: int, resolved: Sequence[str]) -> None:
        """Allow ``host`` and ``port``, where ``resolved`` is every address it stands for.

        ``resolved`` may be empty when ``host`` is an address itself.
        All of ``resolved`` must be allowed, so that whichever is dialled is.

        Raises:
            PeerRefusedError: the peer may not be dialled; the text says which rule.
        """
        shown = f"{_short(host)} port {_short(port)}"
        if not 0 < port <= 0xFFFF:
            raise PeerRefusedError(f"peer {shown} is refused: the port must be 1 to 65535")
        literal = _address(host)
        name = "" if literal is not None else _name(host)
        if literal is None and not name:
            raise PeerRefusedError(f"peer {shown} is refused: not an address or a host name")
        texts = [*resolved] if literal is None else [host, *resolved]
        if not texts:
            raise PeerRefusedError(f"peer {shown} is refused: it resolves to no address")

        rules = [rule for rule in self._rules if rule.port in (None, port)]
        name_allowed = bool(name) and any(rule.allows_name(name) for rule in rules)
        for text in texts:
            address = _address(text)
            if address is None:
                raise PeerRefusedError(
                    f"peer {shown} is refused: it resolves to {_short(text)}, not an address"
                )
            kind = _never_dialled(address)
            if kind:
                raise PeerRefusedError(
                    f"peer {shown} is refused: {address} is {kind} address, which is never dialled"
                )
            if "%" in text:
                # Only link-local addresses need a zone. What follows the % is any text,
                # and the caller would hand all of it to a resolver.
                raise PeerRefusedError(f"peer {shown} is refused: its address names a zone")
            if not (name_allowed or any(rule.allows_address(address) for rule in rules)):
                raise PeerRefusedError(
                    f"peer {shown} ({address}) is not in allow_peers ({self._summary()}); "
                    f"if it is one of yours, add it or its network there"
                )

    def _summary(self) -> str:
        shown = ", ".join(self.entries[:8])
        return shown if len(self.entries) <= 8 else f"{shown} and {len(self.entries) - 8} more"


def _parse_entry(entry: str) -> _Rule:
    if not isinstance(entry, str):
        raise _bad(entry, "it is not text")
    host, port = _split_port(entry)
    if host == "*":
        return _Rule(port=port)
    network = _network(entry, host)
    if network is not None:
        for kind, networks in _NEVER:
            if any(_within(network, never) for never in networks):
                raise _bad(entry, f"{kind} address is never dialled")
        return _Rule(network=network, port=port)
    name = _name(host.removeprefix("*."))
    if not name:
        raise _bad(entry, "it is not an address, a network, a host name or *")
    return _Rule(name=f".{name}" if host.startswith("*.") else name, port=port)


def _split_port(entry: str) -> tuple[str, int | None]:
    bracketed = _BRACKETED.fullmatch(entry)
    if bracketed:
        host, text = bracketed["host"], bracketed["port"]
        if ":" not in host:
            raise _bad(entry, "brackets are for IPv6 addresses")
    elif entry.count(":") == 1:
        host, text = entry.split(":")
    else:
        host, text = entry, None
    if text is None:
        return host, None
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= 0xFFFF):
        raise _bad(entry, f"port {_short(text)} is not a number from 1 to 65535")
    return host, int(text)


def _network(entry: str, host: str) -> _Network | None:
    """The network an entry names; None when it names none."""
    address = _address(host)
    if address is not None:
        return ipaddress.ip_network(address)
    if "/" not in host:
        return None
    try:
        interface = ipaddress.ip_interface(host)
    except ValueError as error:
        raise _bad(entry, "it is not a network") from error
    if interface.ip != interface.network.network_address:
        raise _bad(entry, f"it has host bits set; did you mean {interface.network}")
    if _within(interface.network, _MAPPED):
        raise _bad(entry, "IPv4 networks are written as IPv4, for example 10.0.0.0/8")
    return interface.network


def _within(inner: _Network, outer: _Network) -> bool:
    return (
        inner.version == outer.version
        and inner.prefixlen >= outer.prefixlen
        and inner.network_address in outer
    )


def _address(text: str) -> _Address | None:
    """The address ``text`` spells; an IPv4-mapped IPv6 one as the IPv4 that is dialled."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        # Without the zone: it says by which interface, not where to.
        address = ipaddress.IPv6Address(int(address))
        return address.ipv4_mapped or address
    return address


def _name(text: str) -> str:
    """``text`` as a host name in lower case; empty when it is not one."""
    if not text.isascii():  # lower() turns some other letters into ASCII ones
        return ""
    name = text.lower().removesuffix(".")
    if len(name) > MAX_HOST_CHARS or not _NAME.fullmatch(name) or _ENDS_IN_NUMBER.fullmatch(name):
        return ""
    return name


def is_host_name(text: str) -> bool:
    """Whether ``text`` is spelled as a host name. What ends in a number is an address, or none."""
    return bool(_name(text))


def always_refused(host: str) -> str:
    """The kind of address that no agent dials; empty when ``host`` is another, or a name."""
    address = _address(host)
    return "" if address is None else _never_dialled(address)


def _never_dialled(address: _Address) -> str:
    """The kind of address that is refused always; empty when it is none."""
    for candidate in (address, *_embedded(address)):
        for kind, networks in _NEVER:
            if any(candidate in network for network in networks):
                return kind
    return ""


def _embedded(address: _Address) -> list[ipaddress.IPv4Address]:
    """IPv4 addresses that a gateway may turn this IPv6 address into."""
    if isinstance(address, ipaddress.IPv4Address) or address.is_loopback:
        return []
    found = [address.sixtofour, *(address.teredo or ())]
    if address in _IPV4_COMPATIBLE or any(address in network for network in _NAT64):
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [candidate for candidate in found if candidate is not None]


def _short(value: object) -> str:
    """A peer's value for a message: quoted, without control characters, bounded."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"


def _bad(entry: object, why: str) -> ConfigError:
    return ConfigError(
        f"allow_peers entry {_short(entry)}: {why}. Write an address (10.0.0.5), a network "
        "(10.0.0.0/8), a host name (encoder-0.svc, *.svc.cluster.local) or *, each with "
        ":port if only that port is meant; an IPv6 address with a port as [fd00::1]:14579"
    )
