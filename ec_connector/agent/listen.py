# SPDX-License-Identifier: Apache-2.0
"""Where an agent listens for peers, and what it tells them to dial."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable

import zmq

from ec_connector.config import WILDCARD_HOSTS, Settings
from ec_connector.errors import AgentStartError
from ec_connector.protocol.messages import MAX_BODY_BYTES

DEFAULT_HOST = "127.0.0.1"
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 5000
"""A peer silent for so long is gone, whatever its connection says."""
HANDSHAKE_MS = 5000
"""A connection that has not said who it is by then is closed."""


WAITING_IN = 128
"""Messages of one connection that wait to be read. More stay in the network, and slow down whoever
sends them."""
WAITING_OUT = 65536
"""Messages to one consumer that wait to be sent. A thousand transfers at once need a tenth of it;
who reads nothing and asks on has no more answers than this in our memory."""
CURVE_BYTES = 64
"""Room for what CURVE adds to a frame (33 bytes): libzmq's size limit is for what is sent."""


def bind_peers(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    port: int,
    guard: Callable[[zmq.Socket[bytes]], None] | None = None,
) -> tuple[zmq.Socket[bytes], int]:
    """A bound ROUTER for peers and its port (the given one, or a free one for 0).

    ``guard`` is given the socket before it is bound.

    Raises:
        AgentStartError: names the address and what is wrong with it.
    """
    router = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, WAITING_OUT),
        (zmq.RCVHWM, WAITING_IN),
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.ROUTER_HANDOVER, 0),
        (zmq.IPV6, 1),
        # A consumer that hangs without hanging up keeps bytes in the queue, and those their pin.
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.MAXMSGSIZE, MAX_BODY_BYTES + CURVE_BYTES),
    ):
        router.setsockopt(option, value)
    if guard is not None:
        guard(router)
    host = host or DEFAULT_HOST
    shown = f"[{host}]" if ":" in host and host != "::" else "*" if host in WILDCARD_HOSTS else host
    try:
        router.bind(f"tcp://{shown}:{port or '*'}")
    except zmq.ZMQError as error:
        router.close(linger=0)
        what = {
            errno.EADDRINUSE: "it is in use: stop the other process, or set another port "
            "(or port 0, for a free one that is announced)",
            errno.EADDRNOTAVAIL: "this host has no such address: check bind_host",
            errno.ENODEV: "no such address or name is known here: check bind_host",
        }.get(error.errno or 0, error.strerror or str(error))
        raise AgentStartError(
            f"cannot listen for peers on {host}:{port or 'any'}: {what}"
        ) from error
    bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
    return router, int(bound.rpartition(":")[2])


def exposure(settings: Settings) -> str:
    """What is wrong with listening like this beyond this host; empty when nothing is."""
    host = settings.bind_host or DEFAULT_HOST
    if settings.curve_keys or settings.ticket_key or settings.agent or host == "localhost":
        return ""
    try:
        if ipaddress.ip_address(host).is_loopback:
            return ""
    except ValueError:
        pass  # a wildcard, or a name, which may stand for anything
    return (
        f"bind_host={host} accepts peers beyond this host, and without keys or tickets whoever "
        "reaches the port can read every encoding, and can listen on the way; make keys with "
        "'ec-connector keygen DIR' and set curve_keys and ticket_key, "
        "or keep the port to a private network"
    )


def advertised_host(bind_host: str, advertise_host: str) -> str:
    """The address to announce to peers."""
    if advertise_host:
        return advertise_host
    if bind_host not in WILDCARD_HOSTS:
        return bind_host or DEFAULT_HOST
    return _own_address()


def _own_address() -> str:
    """This host's address on the way out, or loopback when there is no way out.

    Connecting a datagram socket sends nothing; it only makes the kernel choose a route.
    The target is from the range set aside for documentation.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return DEFAULT_HOST
        return str(probe.getsockname()[0])
