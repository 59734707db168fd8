# SPDX-License-Identifier: Apache-2.0
"""Servers that register themselves: known as long as one of their engines says so again.

An engine of several data-parallel ranks registers each under the same URL; the server stays until
the last of them has left or gone silent. Servers of the command line stay whatever registers.
"""

from __future__ import annotations

import hmac
import logging
from typing import Final, Literal

import msgspec

from ec_connector.proxy.instances import Instances, Role
from ec_connector.proxy.intake import RefusedError
from ec_connector.proxy.options import root_url

logger = logging.getLogger("vllm.ec_connector.proxy")

TTL: Final = 15.0
"""Seconds after which a server that said nothing is forgotten."""
SOON: Final = 3.0
"""The same for one that does not serve yet, so that it comes again the sooner."""
MAX_SERVERS: Final = 1024
MAX_BYTES: Final = 4096


class Words(msgspec.Struct, frozen=True):
    """What an engine says: where its HTTP server is, what it serves, and which engine it is."""

    url: str
    serves: list[Literal["encode", "decode"]]
    id: str


class Registrar:
    """Who registered, and until when.

    Args:
        instances: servers are added here, and taken away.
        token: what engines must know; empty: nobody may register.
    """

    def __init__(self, instances: Instances, token: str) -> None:
        self._instances = instances
        self._token = token
        self._until: dict[str, dict[str, float]] = {}
        self._added: dict[str, set[Role]] = {}

    def read(self, authorization: str, raw: bytes) -> Words:
        """A registration by one who may. Raises RefusedError."""
        if not self._token:
            raise RefusedError(403, "this router takes no registrations (--register-token)")
        expected = f"Bearer {self._token}".encode()
        if not hmac.compare_digest(authorization.encode("utf-8", "replace"), expected):
            raise RefusedError(401, "the token is not this router's")
        if len(raw) > MAX_BYTES:
            raise RefusedError(413, f"a registration has at most {MAX_BYTES} bytes")
        try:
            words = msgspec.json.decode(raw, type=Words)
            url = root_url(words.url)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise RefusedError(400, str(error)) from error
        if not words.serves:
            raise RefusedError(400, "it serves nothing")
        return msgspec.structs.replace(words, url=url)

    def renew(self, words: Words, *, healthy: bool, now: float) -> float:
        """An engine is there; the seconds within which it must come again.

        It gets requests once its server was ``healthy``; after that the health checks decide.

        Raises:
            RefusedError: there are too many.
        """
        known = self._until.get(words.url)
        if known is None and not healthy:
            return SOON
        if known is None:
            if len(self._until) >= MAX_SERVERS:
                raise RefusedError(503, f"{MAX_SERVERS} servers are registered already")
            known = self._until[words.url] = {}
        if words.id not in known and len(known) >= MAX_SERVERS:
            raise RefusedError(503, f"{MAX_SERVERS} engines are registered there already")
        known[words.id] = now + TTL
        mine = self._added.setdefault(words.url, set())
        there = {(one.role, one.url) for one in self._instances.all()}
        for role in {Role(name) for name in words.serves} - mine:
            if (role, words.url) not in there:
                self._instances.add(role, words.url)
                mine.add(role)
                logger.info("%s server %s registered", role, words.url)
        return TTL

    def knows(self, words: Words) -> bool:
        """Whether this engine is registered now."""
        return words.id in self._until.get(words.url, {})

    def leave(self, words: Words) -> None:
        """An engine ends."""
        known = self._until.get(words.url)
        if known is not None and known.pop(words.id, None) is not None and not known:
            self._remove(words.url, "left")

    def expire(self, now: float) -> None:
        """Forget those that said nothing for too long."""
        for url, known in list(self._until.items()):
            for engine in [one for one, until in known.items() if until <= now]:
                del known[engine]
            if not known:
                self._remove(url, "said nothing any more")

    def _remove(self, url: str, why: str) -> None:
        del self._until[url]
        for role in self._added.pop(url, set()):
            self._instances.remove(role, url)
            logger.info("%s server %s %s", role, url, why)
