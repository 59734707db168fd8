# SPDX-License-Identifier: Apache-2.0
"""Telling a router that this engine serves, again and again, and that it leaves.

The router forgets who says nothing for as long as it asks for, so an engine that is killed need not
say so. A thread of its own: a router that does not answer must not hold the agent up.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from typing import Any

from ec_connector.config import Settings
from ec_connector.token_file import load_token

logger = logging.getLogger("vllm.ec_connector.agent")

ANSWER_SECONDS = 2.0
RETRY_SECONDS = 2.0
LEAVE_SECONDS = 0.5
"""The agent's owner waits for its end."""
_MAX_BYTES = 4096


class Registration:
    """Keeps one engine registered from :meth:`start` to :meth:`close`.

    Args:
        settings: ``proxy_url``, ``http_url`` and ``proxy_token`` are all set.
        serves: ``"encode"``, ``"decode"`` or both.
        agent_id: tells this engine from an earlier one at the same address.

    Raises:
        ConfigError: the token's file cannot be used.
    """

    def __init__(self, settings: Settings, serves: tuple[str, ...], agent_id: str) -> None:
        self._place = f"{settings.proxy_url.rstrip('/')}/instances"
        self._words = {"url": settings.http_url, "serves": list(serves), "id": agent_id}
        self._token = load_token("proxy_token", settings.proxy_token)
        # Without the environment's HTTP proxies: this is a neighbour.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
        self._known: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="register", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Leave, if the router can be told within half a second."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(2 * LEAVE_SECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._closing.wait(self._renew())
        if self._known == "":
            self._call("DELETE", LEAVE_SECONDS)

    def _renew(self) -> float:
        """Register once; the seconds until it must be done again."""
        answer, fault = self._call("POST", ANSWER_SECONDS)
        ttl = answer.get("ttl")
        if not fault and (not isinstance(ttl, int | float) or not 0 < ttl <= 86400):
            fault = "its answer names no time (ttl) within which to come again"
        if fault != self._known:
            self._known = fault
            if fault:
                logger.warning("not registered at %s: %s", self._place, fault)
            else:
                logger.info("registered at %s as %s", self._place, self._words["url"])
        return RETRY_SECONDS if fault else float(ttl) / 3  # type: ignore[arg-type] # checked above

    def _call(self, method: str, seconds: float) -> tuple[dict[str, Any], str]:
        """The router's answer, and what was wrong with it."""
        request = urllib.request.Request(  # noqa: S310 - Settings lets only http and https pass
            self._place,
            json.dumps(self._words).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"},
            method=method,
        )
        try:
            with self._opener.open(request, timeout=seconds) as response:
                answer = json.loads(response.read(_MAX_BYTES) or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                return {}, f"it answers {error.code}: {error.read(300).decode('utf-8', 'replace')}"
        except (OSError, ValueError) as error:
            return {}, str(getattr(error, "reason", error))
        return (answer, "") if isinstance(answer, dict) else ({}, "its answer is no JSON object")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token goes to the router alone."""

    def redirect_request(self, *_: Any) -> None:
        return None
