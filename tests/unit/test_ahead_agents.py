# SPDX-License-Identifier: Apache-2.0
"""Real agents that a router tells what to fetch: it is there when it is asked for."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ec_connector import Consumer
from ec_connector.protocol.hint import MAX_LINE_BYTES, hint_lines
from ec_connector.testing import FakeProducer
from tests.security.hostile import Victim

TOKEN = "0123456789abcdef"
PATIENCE = 20.0
ROWS = np.arange(300_000, dtype=np.uint8)


class Router:
    """An HTTP server that takes every engine, and tells those that listen what ``say`` is given."""

    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[dict[str, Any], str]] = queue.Queue()
        self.lines: queue.Queue[bytes | None] = queue.Queue()
        router = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                words = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/instances":
                    self._whole(b'{"ttl": 60}')
                    return
                router.heard.put((words, self.headers["Authorization"]))
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while (line := router.lines.get()) is not None:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.close_connection = True

            def do_DELETE(self) -> None:
                self._whole(b"{}")

            def _whole(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def say(self, *lines: bytes) -> None:
        for line in lines:
            self.lines.put(line)

    def break_off(self) -> None:
        """End the answer without its end."""
        self.lines.put(None)

    def close(self) -> None:
        self.break_off()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def router() -> Iterator[Router]:
    """One that says nothing by itself."""
    router = Router()
    yield router
    router.close()


@pytest.fixture
def settings(router: Router, tmp_path: Path) -> dict[str, Any]:
    """Those of an engine that registers there."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    mine = {"proxy_url": router.url, "http_url": "http://10.0.0.9:1", "proxy_token": str(path)}
    return {"pool_size": "8MiB", **mine}


def until(what: Callable[[], bool]) -> bool:
    """Whether it becomes true."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.parametrize("planes", [["zmq"], ["memory", "zmq"]], ids=lambda planes: planes[0])
def test_there_before_it_is_asked_for(
    planes: list[str], router: Router, settings: dict[str, Any]
) -> None:
    """No engine has asked for anything when it is in the pool; who then does is answered there."""
    with (
        FakeProducer(pool_size="8MiB") as producer,
        Consumer(planes=planes, **settings) as consumer,
    ):
        words, authorization = router.heard.get(timeout=PATIENCE)
        assert words["serves"] == ["decode"]
        assert authorization == f"Bearer {TOKEN}"
        announcement = producer.put("a", ROWS)
        router.say(b"\n", *hint_lines({"a": announcement}))
        agent = Victim(consumer)
        assert until(lambda: agent.stats()["ahead_fetched"] == 1)
        before = agent.stats()
        assert (before["entries"], before["blocks_pinned"]) == (1, 0)
        producer.kill()
        assert (consumer.fetch("a", announcement) == ROWS).all()
        after = agent.stats()
        assert after["ready_pool"] == before.get("ready_pool", 0) + 1
        assert after["requests_sent"] == before["requests_sent"] == 1


def test_listens_again(router: Router, settings: dict[str, Any]) -> None:
    """After an answer that broke off, with the same words."""
    with FakeProducer(pool_size="8MiB") as producer, Consumer(**settings) as consumer:
        first = router.heard.get(timeout=PATIENCE)
        router.break_off()
        assert router.heard.get(timeout=PATIENCE) == first
        router.say(*hint_lines({"a": producer.put("a", ROWS)}))
        agent = Victim(consumer)
        assert until(lambda: agent.stats()["ahead_fetched"] == 1)


def test_hostile_hints(router: Router, settings: dict[str, Any]) -> None:
    """Each is counted, none does anything, and the next good one is fetched."""
    with FakeProducer(pool_size="8MiB") as producer, Consumer(**settings) as consumer:
        router.heard.get(timeout=PATIENCE)
        agent = Victim(consumer)
        good = producer.put("a", ROWS)
        lies = [{**good, "shape": "x"}, {**good, "peer_port": 0}, {**good, "size_bytes": 1 << 64}]
        malformed = [b"x" * (20 * MAX_LINE_BYTES), b"[" * 5000, b"\xff\xfe", b"{}", b"null"]
        malformed += [json.dumps({"key": "a", **lie}).encode() for lie in lies]
        forbidden = ["169.254.169.254", "10.9.8.7", "224.0.0.1", "0.0.0.0"]
        router.say(*(line + b"\n" for line in malformed))
        router.say(*(hint_lines({host: {**good, "peer_host": host}})[0] for host in forbidden))
        router.say(*hint_lines({"name": {**good, "peer_host": "encoder.example"}}))
        router.say(*hint_lines({"large": {**good, "size_bytes": 1 << 40, "shape": [1 << 40]}}))
        router.say(*hint_lines({"none": good}), *hint_lines({"a": good}))
        expected = {
            "malformed": len(malformed),
            "failed": len(forbidden) + 1,
            "stranger": 1,
            "no_room": 1,
            "fetched": 1,
        }

        def counted() -> dict[str, int]:
            return {name: agent.stats()[f"ahead_{name}"] for name in expected}

        assert until(lambda: counted() == expected), counted()
        assert (consumer.fetch("a", good) == ROWS).all()
        agent.assert_whole()
