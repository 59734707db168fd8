# SPDX-License-Identifier: Apache-2.0
"""Which peer addresses may be dialled."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_connector.errors import ConfigError, PeerRefusedError
from ec_connector.protocol.addresses import DEFAULT_ALLOW, AllowList

ANY = AllowList.parse(["*"])


def allows(allow: AllowList, host: str, port: int = 14579, *resolved: str) -> bool:
    """Whether the peer passes; an address resolves to itself."""
    try:
        allow.check(host, port, resolved)
    except PeerRefusedError:
        return False
    return True


# ── what an entry allows ─────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("entry", "host", "port", "resolved"),
    [
        ("10.0.0.0/8", "10.200.3.4", 1, ()),
        ("10.0.0.0/8", "10.200.3.4", 65535, ("10.200.3.4",)),
        ("10.0.0.0/8", "encoder-0", 5000, ("10.1.1.1", "10.1.1.2")),
        ("10.0.0.5", "10.0.0.5", 9, ()),
        ("10.0.0.5:14579", "10.0.0.5", 14579, ()),
        ("10.0.0.0/8:14579", "10.0.0.6", 14579, ()),
        ("::ffff:10.0.0.5", "10.0.0.5", 9, ()),
        ("10.0.0.5", "::ffff:10.0.0.5", 9, ()),
        ("fd00::/8", "fd12::1", 9, ()),
        ("fd00::1", "FD00:0::1", 9, ()),
        ("[fd00::1]", "fd00::1", 9, ()),
        ("[fd00::1]:5000", "fd00::1", 5000, ()),
        ("[fd00::/8]:5000", "fd12::1", 5000, ()),
        ("encoder-0.svc", "encoder-0.svc", 9, ("10.0.0.1",)),
        ("encoder-0.svc", "Encoder-0.SVC.", 9, ("10.0.0.1", "fd00::1")),
        ("encoder-0.svc:5000", "encoder-0.svc", 5000, ("10.0.0.1",)),
        ("encoder_0", "encoder_0", 5000, ("127.0.0.1",)),
        ("*.pool.svc", "a.pool.svc", 9, ("10.0.0.1",)),
        ("*.pool.svc:5000", "a.b.pool.svc", 5000, ("10.0.0.1",)),
        ("*", "8.8.8.8", 9, ()),
        ("*", "2001:db8::1", 9, ()),
        ("*", "anything.example", 9, ("127.0.0.1",)),
        ("*:5000", "anything.example", 5000, ("10.0.0.1",)),
    ],
)
def test_allowed(entry: str, host: str, port: int, resolved: tuple[str, ...]) -> None:
    """An entry allows what it names, alone and among others."""
    assert allows(AllowList.parse([entry]), host, port, *resolved)
    assert allows(AllowList.parse(["192.0.2.1", entry, "elsewhere:1"]), host, port, *resolved)


@pytest.mark.parametrize(
    ("entry", "host", "port", "resolved"),
    [
        ("10.0.0.0/8", "11.0.0.1", 9, ()),
        ("10.0.0.0/8", "::a00:1", 9, ()),
        ("10.0.0.5:14579", "10.0.0.5", 14580, ()),
        ("10.0.0.0/8", "encoder-0", 9, ("10.1.1.1", "192.168.0.1")),  # one of two is outside
        ("10.0.0.0/8", "10.0.0.1", 9, ("192.168.0.1",)),  # does not resolve to itself
        ("::/0", "10.0.0.1", 9, ()),
        ("::/0", "::ffff:10.0.0.1", 9, ()),
        ("fd00::/8", "fe00::1", 9, ()),
        ("[fd00::1]:5000", "fd00::1", 5001, ()),
        ("encoder-0.svc", "encoder-1.svc", 9, ("10.0.0.1",)),
        ("encoder-0.svc", "encoder-0.svc.evil", 9, ("10.0.0.1",)),
        ("encoder-0.svc", "10.0.0.1", 9, ("10.0.0.1",)),  # the name is allowed, not its address
        ("encoder-0.svc:5000", "encoder-0.svc", 5001, ("10.0.0.1",)),
        ("*.pool.svc", "pool.svc", 9, ("10.0.0.1",)),
        ("*.pool.svc", "evilpool.svc", 9, ("10.0.0.1",)),
        ("*.pool.svc", ".pool.svc", 9, ("10.0.0.1",)),
        ("*:5000", "10.0.0.1", 5001, ()),
    ],
)
def test_not_allowed(entry: str, host: str, port: int, resolved: tuple[str, ...]) -> None:
    """An entry allows nothing beside what it names."""
    assert not allows(AllowList.parse([entry]), host, port, *resolved)


def test_an_empty_list_means_loopback_only() -> None:
    """The default lets a pair on one machine work and dials nothing else."""
    default = AllowList.parse([])
    assert default.entries == DEFAULT_ALLOW
    for host, resolved in (("127.0.0.1", ()), ("127.9.9.9", ()), ("::1", ())):
        assert allows(default, host, 14579, *resolved)
    assert allows(default, "localhost", 14579, "127.0.0.1", "::1")
    assert not allows(default, "localhost", 14579, "127.0.0.1", "10.0.0.1")
    assert not allows(default, "10.0.0.1")


@pytest.mark.parametrize(
    ("entries", "host", "port", "worth_it"),
    [
        ([], "encoder-0", 9, False),
        ([], "localhost", 9, True),
        ([], "one.localhost", 9, True),
        ([], "localhost.evil", 9, False),
        (["10.0.0.0/8"], "encoder-0", 9, True),  # only its address tells
        (["10.0.0.0/8:5000"], "encoder-0", 5001, False),
        (["::/0"], "encoder-0", 9, True),
        (["::1", "encoder-0"], "encoder-0", 9, True),
        (["::1", "encoder-0"], "encoder-1", 9, False),
        (["encoder-0:5000"], "encoder-0", 5001, False),
        (["*.pool.svc"], "a.pool.svc", 9, True),
        (["*"], "encoder-0", 9, True),
        (["*"], "encoder-0", 0, False),
        (["*"], "0x7f.1", 9, False),
        (["10.0.0.0/8"], "localhost", 9, True),
    ],
)
def test_which_names_are_worth_a_lookup(
    entries: list[str], host: str, port: int, worth_it: bool
) -> None:
    """Only those that an entry allows by name, or could allow by what they stand for."""
    allowed = AllowList.parse(entries)
    if worth_it:
        allowed.check_name(host, port)
    else:
        with pytest.raises(PeerRefusedError, match="is not looked up"):
            allowed.check_name(host, port)


def test_given_entries_replace_the_default() -> None:
    """Loopback is allowed because it is listed, not always."""
    assert not allows(AllowList.parse(["10.0.0.0/8"]), "127.0.0.1")


# ── what is refused whatever the list says ───────────────────────────────────

NEVER = {
    "cloud metadata": [
        "169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16",
        "fd00:ec2::254", "fd20:ce::254",
    ],
    "link-local": ["169.254.0.1", "169.254.255.255", "fe80::1", "febf::1", "fe80::1%eth0"],
    "multicast": ["224.0.0.1", "239.255.255.255", "ff02::1", "ff05::2%1"],
    "broadcast": ["255.255.255.255"],
    "unspecified": ["0.0.0.0", "0.1.2.3", "::", "::%lo"],
}  # fmt: skip
NEVER_V4 = [text for texts in NEVER.values() for text in texts if ":" not in text]


@pytest.mark.parametrize(
    ("kind", "address"), [(kind, text) for kind, texts in NEVER.items() for text in texts]
)
def test_never_dialled(kind: str, address: str) -> None:
    """Not as the host, not behind a name that is allowed; the text names the kind."""
    own_entry = AllowList.parse(["0.0.0.0/0", "::/0", "*", "innocent.example"])
    for host, resolved in ((address, ()), ("innocent.example", ("10.0.0.1", address))):
        with pytest.raises(PeerRefusedError, match=kind):
            own_entry.check(host, 14579, resolved)


@pytest.mark.parametrize("address", NEVER_V4)
def test_never_dialled_in_ipv6_notation(address: str) -> None:
    """Mapped, compatible, NAT64 and 6to4 forms lead to the same IPv4 address."""
    number = int(ipaddress.IPv4Address(address))
    high, low = number >> 16, number & 0xFFFF
    tail = f"{high:x}:{low:x}"
    forms = [
        f"::ffff:{address}",
        f"::ffff:{tail}",
        f"64:ff9b::{tail}",
        f"64:ff9b:1::{tail}",
        f"2002:{tail}::1",
        f"2001:0:{tail}::1",  # Teredo: the server
        f"2001::{high ^ 0xFFFF:x}:{low ^ 0xFFFF:x}",  # Teredo: the client
    ]
    if number not in (0, 1):
        forms.append(f"::{tail}")
    for form in forms:
        assert not allows(ANY, form), form


@pytest.mark.parametrize("port", [0, -1, 65536, 1 << 40])
def test_ports_that_are_none(port: int) -> None:
    """Port 0 and whatever does not fit 16 bits, before any address is looked at."""
    with pytest.raises(PeerRefusedError, match="port must be 1 to 65535"):
        ANY.check("10.0.0.1", port, [])


@pytest.mark.parametrize(
    "host",
    ["", " ", ".", "127.1", "0x7f.1", "0x7f000001", "2130706433", "017700000001", "10.0.0.256",
     "10.0.0.1\n", "10.0.0.1 ", "a b", "a/b", "tcp://a", "a:80", "[fd00::1]", "-a", "a-", "a..b",
     "a" * 64, "a." * 127 + "a", "é", "\u212a", "1.2.3.4.", "a\x00b", "*", "*.svc"],
)  # fmt: skip
def test_hosts_that_are_neither_address_nor_name(host: str) -> None:
    """Odd spellings, which resolvers may read as an address, are refused unresolved."""
    with pytest.raises(PeerRefusedError, match="not an address or a host name"):
        ANY.check(host, 14579, ["10.0.0.1"])


@pytest.mark.parametrize("address", ["::1%lo", "fd00::1%eth0", "::1%]:22;", "::ffff:10.0.0.1%x"])
def test_addresses_with_a_zone_are_refused(address: str) -> None:
    """What follows the % is any text, and would be handed to the system's resolver."""
    for host, resolved in ((address, ()), ("encoder-0", (address,))):
        with pytest.raises(PeerRefusedError, match="zone"):
            ANY.check(host, 14579, resolved)


def test_names_must_resolve_to_addresses() -> None:
    """Without an address there is nothing to check, so nothing is allowed."""
    with pytest.raises(PeerRefusedError, match="resolves to no address"):
        ANY.check("encoder-0", 14579, [])
    with pytest.raises(PeerRefusedError, match="not an address"):
        ANY.check("encoder-0", 14579, ["10.0.0.1", "encoder-1"])


def test_refusal_says_what_to_do() -> None:
    """The text names peer, list and setting, and a long list is cut."""
    with pytest.raises(
        PeerRefusedError, match=r"'10\.9\.9\.9' port 5.*allow_peers.*127\.0\.0\.0/8"
    ):
        AllowList.parse([]).check("10.9.9.9", 5, [])
    with pytest.raises(PeerRefusedError, match=r"10\.0\.0\.7 and 32 more"):
        AllowList.parse([f"10.0.0.{n}" for n in range(40)]).check("10.9.9.9", 5, [])


def test_hostile_text_is_quoted_and_cut() -> None:
    """A log line stays one line of bounded length."""
    with pytest.raises(PeerRefusedError) as refused:
        ANY.check("a\nERROR forged \x1b[31m" + "x" * 10_000, 5, [])
    text = str(refused.value)
    assert len(text) < 300
    assert text.isprintable()


# ── entries that are none ────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("", "not an address"),
        (" 10.0.0.1", "not an address"),
        ("10.0.0.256", "not an address"),
        ("127.1", "not an address"),
        ("a b", "not an address"),
        ("*.", "not an address"),
        ("*svc", "not an address"),
        ("a.*.b", "not an address"),
        ("**", "not an address"),
        ("10.0.0.0/33", "not a network"),
        ("a/b", "not a network"),
        ("10.0.0.5/8", "did you mean 10.0.0.0/8"),
        ("fd00::5/64", "did you mean fd00::/64"),
        ("::ffff:10.0.0.0/104", "written as IPv4"),
        ("10.0.0.1:", "port ''"),
        ("10.0.0.1:0", "port '0'"),
        ("10.0.0.1:65536", "port '65536'"),
        ("10.0.0.1:+5", "port"),
        ("10.0.0.1:\uff15", "port"),
        ("a:http", "port 'http'"),
        ("[10.0.0.1]:5", "brackets"),
        ("[a]:5", "brackets"),
        ("[fd00::1", "not an address"),
        ("fd00::1:70000", "not an address"),
        ("0.0.0.0", "never dialled"),
        ("169.254.0.0/17", "never dialled"),
        ("169.254.169.254:80", "never dialled"),
        ("fe80::/64", "never dialled"),
        ("224.0.0.0/4", "never dialled"),
        ("[ff02::1]:5", "never dialled"),
        (5, "not text"),
        (None, "not text"),
    ],
)
def test_entries_that_are_refused(entry: str, says: str) -> None:
    """A mistyped entry fails at start, names itself and says what may be written."""
    with pytest.raises(ConfigError) as refused:
        AllowList.parse(["10.0.0.1", entry])
    text = str(refused.value)
    assert says in text
    assert "allow_peers" in text
    assert ascii(entry) in text
    assert "10.0.0.0/8" in text


# ── for all addresses ────────────────────────────────────────────────────────

v4 = st.ip_addresses(v=4)
v6 = st.ip_addresses(v=6)
ports = st.integers(1, 65535)


def never(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """By the standard library's own tables, which this package does not use."""
    return address.is_multicast or address.is_link_local or address.is_unspecified


@pytest.mark.property
@given(address=v4 | v6, port=ports)
def test_star_allows_unicast_only(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    """No multicast, link-local or unspecified address passes ``*``."""
    if allows(ANY, str(address), port):
        assert not never(address)
        assert allows(AllowList.parse(["0.0.0.0/0", "::/0"]), str(address), port)


@pytest.mark.property
@given(
    network=v4.map(lambda a: ipaddress.ip_network((a, 20), strict=False)), address=v4, port=ports
)
def test_network_allows_its_addresses_only(
    network: ipaddress.IPv4Network, address: ipaddress.IPv4Address, port: int
) -> None:
    """As the host, behind a name and in mapped notation alike."""
    try:
        allow = AllowList.parse([str(network)])
    except ConfigError:
        assert (
            network.is_link_local
            or network.is_multicast
            or network.is_unspecified
            or (network.network_address in ipaddress.ip_network("0.0.0.0/8"))
        )
        return
    inside = network.network_address + int(address) % network.num_addresses
    for candidate in (address, inside):
        passes = allows(allow, str(candidate), port)
        assert passes == (candidate in network and allows(ANY, str(candidate), port))
        assert allows(allow, "a-name", port, str(candidate)) == passes
        assert allows(allow, f"::ffff:{candidate}", port) == passes


@pytest.mark.property
@given(
    entries=st.lists(st.text(alphabet="0123456789abcdef.:/[]*-%x ", max_size=12), max_size=3),
    host=st.text(max_size=20) | st.text(alphabet="0123456789abcdefx.:%[]", max_size=20),
    port=st.integers(),
    resolved=st.lists(st.text(alphabet="0123456789abcdef.:%", max_size=20), max_size=3),
)
def test_no_text_breaks_it(entries: list[str], host: str, port: int, resolved: list[str]) -> None:
    """Only ConfigError from a list, only PeerRefusedError from a peer."""
    try:
        allow = AllowList.parse(entries)
    except ConfigError:
        allow = ANY
    allows(allow, host, port, *resolved)
