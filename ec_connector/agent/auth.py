# SPDX-License-Identifier: Apache-2.0
"""Who may connect: CURVE on the peers' socket, and ZAP answered in the agent's own loop.

libzmq asks (ZAP, RFC 27) for each handshake whose encryption is right whether that client
key is welcome. Whoever holds the server's public key but no listed key ends there: no
message of it reaches the agent. Whoever speaks without CURVE, or for another server's
key, ends in libzmq before.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ec_connector.agent.reactor import Reactor
from ec_connector.config import Settings
from ec_connector.curve import CLIENT, AllowedKeys, Credentials, load_keys
from ec_connector.errors import ConfigError

logger = logging.getLogger("vllm.ec_connector.agent")

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_WATCH_ENDPOINT = "inproc://ec-handshakes"
_DOMAIN = b"ec_connector"
_BUDGET = 64
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Gate:
    """The peers' way in when ``curve_keys`` is set.

    Args:
        context: the agent's own; ZAP holds for every socket of it.
        reactor: the agent's loop.
        settings: with ``curve_keys``, and ``curve_allow`` if the list is elsewhere.

    Raises:
        ConfigError: a key file is missing, unreadable or no key.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], reactor: Reactor, settings: Settings
    ) -> None:
        directory = Path(settings.curve_keys)
        self.credentials: Credentials = load_keys(directory)
        self._context = context
        self._reactor = reactor
        self._allowed: AllowedKeys | None = None
        self._refused = 0
        self._failed = 0
        self._watch: zmq.Socket[bytes] | None = None
        if self.credentials.server is not None:
            listed = Path(settings.curve_allow) if settings.curve_allow else None
            self._allowed = AllowedKeys(listed or directory / f"{CLIENT}.key", time.monotonic())
            _warn_of_lack(self._allowed)
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ENDPOINT)
        reactor.add(self._zap, self._answer)

    def guard(self, router: zmq.Socket[bytes]) -> None:
        """Let only listed keys through to this socket. Call it before the socket is bound.

        Without a secret of its own the socket gets one that nobody knows the public half
        of: it is bound, and closed to everybody.
        """
        server = self.credentials.server
        secret = server.secret if server is not None else zmq.curve_keypair()[1]
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        router.monitor(_WATCH_ENDPOINT, _FAILED)
        watch = self._context.socket(zmq.PAIR)
        # Full queues here would stop libzmq's I/O thread, and with it every transfer.
        watch.setsockopt(zmq.RCVHWM, 0)
        watch.connect(_WATCH_ENDPOINT)
        self._watch = watch
        self._reactor.add(watch, self._count)

    def welcome(self, frame: zmq.Frame) -> bool:
        """Whether the key that a frame came with is still listed."""
        return self._listed(str(frame.get("User-Id")).encode("ascii", "replace"))

    def counts(self) -> dict[str, int]:
        """Handshakes that failed, by why."""
        return {"peers_key_refused": self._refused, "peers_handshake_failed": self._failed}

    def _answer(self) -> None:
        for _ in range(_BUDGET):
            try:
                frames = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._zap.send_multipart(self._verdict(frames))

    def _verdict(self, frames: list[bytes]) -> list[bytes]:
        request_id = frames[1] if len(frames) > 1 else b""
        key = b""
        if len(frames) == 7 and frames[0] == b"1.0" and frames[5] == b"CURVE":
            key = z85.encode(frames[6]) if len(frames[6]) == 32 else b""
        if self._listed(key):
            return [b"1.0", request_id, b"200", b"OK", key, b""]
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # 1, 2, 4, 8 ... times
            where = frames[3].decode("ascii", "replace") if len(frames) > 3 else "?"
            logger.warning(
                "peer=%.64s refused (%d so far): its client key is not allowed; "
                "add its public key to curve_allow if it should be",
                where,
                self._refused,
            )
        return [b"1.0", request_id, b"400", b"client key is not allowed", b"", b""]

    def _listed(self, key: bytes) -> bool:
        if self._allowed is None:
            return False
        try:
            if self._allowed.refresh(time.monotonic()):
                logger.info("allowed client keys were read again: %d", len(self._allowed))
                _warn_of_lack(self._allowed)
        except ConfigError as error:
            logger.error("the last good list of client keys stays in force: %s", error)
        return self._allowed.allows(key)

    def _count(self) -> None:
        while self._watch is not None and self._watch.poll(0):
            recv_monitor_message(self._watch)
            self._failed += 1


def _warn_of_lack(allowed: AllowedKeys) -> None:
    if lack := allowed.lack():
        logger.warning("%s", lack)
