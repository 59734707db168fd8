# SPDX-License-Identifier: Apache-2.0
"""Servers that register themselves: who may, for how long they are known, and what they get."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the proxy extra is not installed")
pytest.importorskip("uvicorn", reason="the proxy extra is not installed")
pytest.importorskip("starlette", reason="the proxy extra is not installed")
pytest.importorskip("prometheus_client", reason="the proxy extra is not installed")

from ec_connector import Consumer, Producer
from ec_connector.proxy import main
from ec_connector.proxy.instances import Instances, Role
from ec_connector.proxy.intake import RefusedError
from ec_connector.proxy.registrar import (
    MAX_BYTES,
    MAX_SERVERS,
    SOON,
    TTL,
    Registrar,
    Words,
)
from tests.router.net import (
    PATIENCE,
    Net,
    announcing,
    answering,
    entry,
    image,
    network,
    request,
    run,
)  # fmt: skip

TOKEN = "0123456789abcdef"
URL = "http://10.0.0.7:8101"


def words(url: str = URL, *serves: str, engine: str = "a") -> Words:
    """What an engine says of itself."""
    return Words(url, list(serves or ("encode",)), engine)  # type: ignore[arg-type] # also wrong ones


class Desk:
    """A registrar, and whom it knows."""

    def __init__(self) -> None:
        self.instances = Instances()
        self.registrar = Registrar(self.instances, TOKEN)

    def known(self) -> set[tuple[str, str]]:
        """Role and URL of each."""
        return {(str(one.role), one.url) for one in self.instances.all()}

    def come(self, *serves: str, engine: str = "a", now: float = 0.0, url: str = URL) -> float:
        """A healthy engine registers."""
        return self.registrar.renew(words(url, *serves, engine=engine), healthy=True, now=now)


def test_known_as_long_as_it_says_so() -> None:
    """Forgotten after the time that it was told, not before."""
    desk = Desk()
    assert desk.come(now=0.0) == TTL
    desk.registrar.expire(TTL - 0.01)
    desk.come(now=TTL - 0.01)
    desk.registrar.expire(2 * TTL - 0.02)
    assert desk.known() == {("encode", URL)}
    desk.registrar.expire(2 * TTL)
    assert desk.known() == set()
    desk.come(now=2 * TTL)
    assert desk.known() == {("encode", URL)}


def test_known_once_it_serves() -> None:
    """Until its server is healthy it is told to come again soon; then the circuit decides."""
    desk = Desk()
    assert desk.registrar.renew(words(), healthy=False, now=0.0) == SOON
    assert desk.known() == set()
    desk.come()
    assert desk.registrar.renew(words(), healthy=False, now=1.0) == TTL
    assert desk.known() == {("encode", URL)}


def test_both_roles_and_two_engines() -> None:
    """A server with two engines stays until both have left."""
    desk = Desk()
    desk.come("encode", "decode", engine="a")
    desk.come("encode", "decode", engine="b")
    desk.registrar.leave(words(engine="a"))
    desk.registrar.leave(words(engine="a"))
    desk.registrar.leave(words(engine="unknown"))
    assert desk.known() == {("encode", URL), ("decode", URL)}
    desk.registrar.leave(words(engine="b"))
    assert desk.known() == set()
    desk.registrar.leave(words(engine="b"))


def test_servers_of_the_command_line_stay() -> None:
    """Whatever registers under their address, and leaves."""
    desk = Desk()
    mine = desk.instances.add(Role.ENCODE, URL, 2)
    desk.come("encode", "decode")
    desk.registrar.leave(words())
    assert desk.instances.all() == [mine]


def test_a_server_that_comes_back_is_a_new_one() -> None:
    """What was held against the last one is not held against it."""
    desk = Desk()
    desk.come()
    (first,) = desk.instances.all()
    for _ in range(3):
        first.circuit.failed(0.0)
    assert not first.usable
    desk.come(now=1.0)
    assert desk.instances.all() == [first]
    desk.registrar.leave(words())
    desk.come(now=2.0, engine="b")
    (second,) = desk.instances.all()
    assert second.usable


def test_their_number_is_bounded() -> None:
    """Of servers, and of engines of one."""
    desk = Desk()
    for number in range(MAX_SERVERS):
        desk.come(url=f"http://10.0.0.7:{number}")
    with pytest.raises(RefusedError, match="1024 servers are registered"):
        desk.come()
    for number in range(MAX_SERVERS - 1):
        desk.come(url="http://10.0.0.7:1", engine=str(number))
    with pytest.raises(RefusedError, match="1024 engines are registered"):
        desk.come(url="http://10.0.0.7:1", engine="one more")


GOOD = {"url": URL, "serves": ["encode"], "id": "a"}


@pytest.mark.parametrize(
    ("token", "raw", "status"),
    [
        (f"Bearer {TOKEN}", json.dumps({**GOOD, "more": 1}).encode(), 0),
        (f"Bearer {TOKEN}x", json.dumps(GOOD).encode(), 401),
        (f"bearer {TOKEN}", json.dumps(GOOD).encode(), 401),
        (TOKEN, json.dumps(GOOD).encode(), 401),
        ("", json.dumps(GOOD).encode(), 401),
        ("Bearer \udcff", json.dumps(GOOD).encode(), 401),
        (f"Bearer {TOKEN}", b"", 400),
        (f"Bearer {TOKEN}", b"[]", 400),
        (f"Bearer {TOKEN}", b"\xff", 400),
        (f"Bearer {TOKEN}", json.dumps({**GOOD, "serves": []}).encode(), 400),
        (f"Bearer {TOKEN}", json.dumps({**GOOD, "serves": ["prefill"]}).encode(), 400),
        (f"Bearer {TOKEN}", json.dumps({**GOOD, "url": "http://h/v1"}).encode(), 400),
        (f"Bearer {TOKEN}", json.dumps({**GOOD, "url": "http://[::1"}).encode(), 400),
        (f"Bearer {TOKEN}", json.dumps({**GOOD, "url": "file:///etc"}).encode(), 400),
        (f"Bearer {TOKEN}", json.dumps({"url": URL}).encode(), 400),
        (f"Bearer {TOKEN}", b" " * (MAX_BYTES + 1), 413),
    ],
)
def test_who_may_register_what(token: str, raw: bytes, status: int) -> None:
    """The token first; then what is said."""
    registrar = Registrar(Instances(), TOKEN)
    if not status:
        assert registrar.read(token, raw) == words()
        return
    with pytest.raises(RefusedError) as raised:
        registrar.read(token, raw)
    assert raised.value.status == status
    assert TOKEN not in str(raised.value)


def test_nobody_may_without_a_token() -> None:
    """Least of all one who knows that it is empty."""
    with pytest.raises(RefusedError) as raised:
        Registrar(Instances(), "").read("Bearer ", json.dumps(GOOD).encode())
    assert raised.value.status == 403


# ── with a real router ───────────────────────────────────────────────────────


@pytest.fixture
def token(tmp_path: Path) -> str:
    """A file with the token."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return str(path)


async def known(net: Net, *expected: tuple[str, str]) -> None:
    """Wait until the router knows exactly these, by role and URL."""
    async with asyncio.timeout(PATIENCE):
        while True:
            async with net.client.get(f"{net.url}/instances") as response:
                found = (await response.json())["instances"]
            if {(one["role"], one["url"]) for one in found} == set(expected):
                return
            await asyncio.sleep(0.02)


def test_agents_register_and_leave(token: str) -> None:
    """Real agents come, one of them as soon as its server is healthy; requests reach both."""

    async def test() -> None:
        params = {"h": entry(0)}
        async with network(
            [announcing(params)], [answering], encode=(), decode=(), register_token=token
        ) as net:
            encoder, decoder = net.encoder, net.decoder
            encoder.healthy = False

            def settings(url: str) -> dict[str, Any]:
                mine = {"proxy_url": net.url, "http_url": url, "proxy_token": token}
                return {"pool_size": "1MiB", **mine}

            async with net.chat(request(image("a"))) as response:
                assert response.status == 503
            producer = await asyncio.to_thread(lambda: Producer(**settings(encoder.url)))
            consumer = await asyncio.to_thread(lambda: Consumer(**settings(decoder.url)))
            try:
                await known(net, ("decode", decoder.url))
                encoder.healthy = True
                await known(net, ("decode", decoder.url), ("encode", encoder.url))
                async with net.chat(request(image("a"))) as response:
                    assert response.status == 200
                assert decoder.bodies[-1]["ec_transfer_params"] == params
            finally:
                await asyncio.to_thread(consumer.close)
                await known(net, ("encode", encoder.url))
                await asyncio.to_thread(producer.close)
            await known(net)

    run(test)


@pytest.mark.parametrize("given", [True, False])
def test_strangers_do_not_register(token: str, given: bool) -> None:
    """Over HTTP: without the token, and at a router that takes nobody."""

    async def test() -> None:
        options = {"register_token": token} if given else {}
        async with network([], [answering], **options) as net:
            for method in ("POST", "DELETE"):
                async with net.client.request(
                    method, f"{net.url}/instances", json={**GOOD, "url": net.decoder.url}
                ) as response:
                    assert response.status == (401 if given else 403)
            async with net.client.post(f"{net.url}/instances", data=b" " * 5000) as response:
                assert response.status == 413
            await known(net, ("decode", net.decoder.url))

    run(test)


def test_a_token_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The router does not start, and says which file."""
    missing = str(tmp_path / "none")
    assert main(["--register-token", missing, "--port", "0"]) == 1
    assert f"--register-token={missing!r} cannot be read" in caplog.text
