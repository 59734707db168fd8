# SPDX-License-Identifier: Apache-2.0
"""An engine's agent at a router: it comes, comes again, and leaves, whatever the router does."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ec_connector import Consumer, Producer
from ec_connector.config import AgentOptions, Settings
from ec_connector.errors import AgentStartError, ConfigError

ROWS = np.arange(6, dtype=np.uint8)
TOKEN = "0123456789abcdef"
TTL = 0.15
PATIENCE = 20.0
HERE = "http://10.0.0.9:8101"


class FakeRouter:
    """An HTTP server that notes what is asked of it, and answers as it is told."""

    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[str, str, dict[str, Any], str]] = queue.Queue()
        self.answers: dict[str, tuple[int, bytes]] = {}
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if self.path == "/instances/ahead":  # as a router of an earlier version
                    self.send_error(404)
                    return
                words = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                token = self.headers["Authorization"]
                router.heard.put((self.command, self.path, words, token))
                good = (200, json.dumps({"ttl": TTL}).encode())
                status, body = router.answers.get(self.command, good)
                self.send_response(status)
                self.send_header("Location", f"http://127.0.0.1:{router.port}/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            do_DELETE = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def next(self) -> tuple[str, str, dict[str, Any], str]:
        """The next call."""
        return self.heard.get(timeout=PATIENCE)

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    """One that takes everybody."""
    fake = FakeRouter()
    yield fake
    fake.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """A file with the token, for its owner alone."""
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def registered(router: FakeRouter, token: Path, **settings: Any) -> dict[str, Any]:
    """Settings of an engine that registers there."""
    url = f"http://127.0.0.1:{router.port}"
    mine = {"proxy_url": url, "http_url": HERE, "proxy_token": str(token)}
    return {"pool_size": "1MiB", **mine, **settings}


@pytest.mark.parametrize(("kind", "serves"), [(Producer, "encode"), (Consumer, "decode")])
def test_comes_and_goes(kind: type, serves: str, router: FakeRouter, token: Path) -> None:
    """Registered at once and again within the time that the router gives; removed at the end."""
    with kind(**registered(router, token)):
        calls = [router.next() for _ in range(3)]
    words = calls[0][2]
    assert words == {"url": HERE, "serves": [serves], "id": words["id"]}
    assert calls == [("POST", "/instances", words, f"Bearer {TOKEN}")] * 3
    while (call := router.next())[0] == "POST":
        pass
    assert call == ("DELETE", "/instances", words, f"Bearer {TOKEN}")
    assert router.heard.empty()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"no such token", "it answers 401: no such token"),
        (302, b"", "it answers 302"),
        (200, b"<html>", "Expecting value"),
        (200, b"[]", "no JSON object"),
        (200, b'{"ttl": 0}', "names no time"),
        (200, b'{"ttl": 1e99}', "names no time"),
    ],
)
def test_a_router_that_does_not_take_it(
    status: int,
    body: bytes,
    words: str,
    router: FakeRouter,
    token: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Said without the token, and the agent serves; nobody is told that it leaves."""
    router.answers["POST"] = status, body
    with Producer(**registered(router, token)) as producer:
        assert producer.put("a", ROWS)["size_bytes"] == ROWS.nbytes
        assert router.next()[:2] == ("POST", "/instances")
    assert router.heard.empty()
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "not registered at" in line]
    assert words in said
    assert TOKEN not in said


def test_tried_again(router: FakeRouter, token: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A router that comes up later, or goes away for a while; each change is said once."""
    router.answers["POST"] = 503, b"starting"
    with Consumer(**registered(router, token)):
        for _ in range(2):
            router.next()
        router.answers.clear()
        for _ in range(3):
            router.next()
    said = [line for line in capfd.readouterr().err.splitlines() if "registered at" in line]
    assert len(said) == 2
    assert "not registered at" in said[0]
    assert f"as {HERE}" in said[1]


def test_no_router_there(token: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing listens: the engine starts, serves and ends as without a router."""
    router = FakeRouter()
    router.close()
    with Producer(**registered(router, token)) as producer:
        assert producer.put("a", ROWS)["size_bytes"] == ROWS.nbytes
    assert "not registered at" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("short", 0o600, "holds no token"),
        (f"{TOKEN} {TOKEN}", 0o600, "holds no token"),
        (f"{TOKEN}\n{TOKEN}", 0o600, "holds no token"),
        ("ä" * 32, 0o600, "holds no token"),
        (TOKEN, 0o644, "chmod 600"),
    ],
)
def test_a_token_that_is_none(
    text: str, mode: int, words: str, router: FakeRouter, token: Path
) -> None:
    """The start fails, and the text does not show it."""
    token.write_text(text)
    token.chmod(mode)
    with pytest.raises(AgentStartError, match=words) as raised:
        Producer(**registered(router, token))
    assert text not in str(raised.value)


def test_no_token_there(router: FakeRouter, tmp_path: Path) -> None:
    """Named, with what the system says."""
    with pytest.raises(AgentStartError, match="No such file"):
        Producer(**registered(router, tmp_path / "none"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"http_url": ""}, "proxy_token and proxy_url without http_url"),
        ({"proxy_url": "", "http_url": ""}, "proxy_token without proxy_url and http_url"),
        ({"http_url": "10.0.0.9:8101"}, "http_url='10.0.0.9:8101' is not a server's root"),
        ({"http_url": "http://u:p@host"}, "is not a server's root"),
        ({"proxy_url": "http://host:8000/v1"}, "is not a server's root"),
        ({"proxy_url": "http://host:99999"}, "is not a server's root"),
        ({"proxy_url": "http://[::1"}, "is not a server's root"),
        ({"proxy_url": "file:///etc"}, "is not a server's root"),
    ],
)
def test_settings_that_do_not_fit(change: dict[str, str], words: str) -> None:
    """Refused at the start, with what is missing or wrong."""
    good = {"proxy_url": "http://router:8000", "http_url": HERE, "proxy_token": "token"}
    assert Settings.parse(good).http_url == HERE
    with pytest.raises(ConfigError) as raised:
        Settings.parse({**good, **change})
    assert words in str(raised.value)


def test_an_agent_alone_has_nothing_to_register() -> None:
    """It serves no HTTP requests."""
    good = {"proxy_url": "http://router:8000", "http_url": HERE, "proxy_token": "token"}
    with pytest.raises(ConfigError, match="an agent alone serves no HTTP"):
        AgentOptions(settings=Settings.parse(good))
