# SPDX-License-Identifier: Apache-2.0
"""The router on real sockets, between real HTTP clients and fake OpenAI servers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="the proxy extra is not installed")
pytest.importorskip("uvicorn", reason="the proxy extra is not installed")
pytest.importorskip("starlette", reason="the proxy extra is not installed")
pytest.importorskip("prometheus_client", reason="the proxy extra is not installed")

from aiohttp import web  # noqa: E402

from ec_connector.proxy import main, upstream  # noqa: E402
from ec_connector.proxy.media import identified  # noqa: E402
from ec_connector.proxy.options import Address, Options, parse_options  # noqa: E402
from ec_connector.proxy.serve import listen  # noqa: E402
from ec_connector.units import format_duration, format_size  # noqa: E402
from tests.router.net import (  # noqa: E402
    PATIENCE,
    Handler,
    announcing,
    answering,
    closed_port,
    entry,
    image,
    network,
    never,
    request,
    run,
)  # fmt: skip


def test_media_goes_to_the_encoder_and_its_announcement_to_the_decoder() -> None:
    """Encoder: the media, one token, no stream; decoder: the request plus the announcement."""
    params = {"hash-a": entry(0)}
    body = request(
        image("a"),
        stream=False,
        max_tokens=7,
        stream_options=None,
        n=2,
        response_format={"type": "json_object"},
        mm_processor_kwargs={"max_pixels": 784},
        chat_template_kwargs={"x": 1},
    )
    named = identified(body)
    content = named["messages"][0]["content"]

    async def test() -> None:
        async with network([announcing(params)], [answering], metadata_only=False) as net:
            async with net.chat(body) as response:
                assert response.status == 200
                answer = await response.json()
            assert answer["choices"][0]["message"]["content"] == "a cat"
            assert net.encoder.bodies == [
                {
                    "model": "m",
                    "messages": [{"role": "user", "content": content[:1]}],
                    "stream": False,
                    "max_tokens": 1,
                    "mm_processor_kwargs": {"max_pixels": 784},
                    "chat_template_kwargs": {"x": 1},
                }
            ]
            assert net.decoder.bodies == [{**named, "ec_transfer_params": params}]
            assert await net.metric('vllm:ec_proxy_encodes_total{outcome="ok"}') == 1
            assert await net.metric("vllm:ec_proxy_items_announced_total") == 1
            await net.metric_becomes('vllm:ec_proxy_requests_total{kind="media",status="200"}', 1)

    run(test)


def test_text_goes_straight_to_the_decoder_byte_for_byte() -> None:
    """A request without media asks no encoder, and its bytes are not re-encoded."""
    raw = b'{"model":"m",  "messages":[{"role":"user","content":"h\\u00e9"}], "temperature":1.0}'
    seen = []

    async def keep(received: web.Request) -> web.Response:
        seen.append(await received.read())
        return await answering(received)

    async def test() -> None:
        async with network([never], [keep]) as net:
            url = f"{net.url}/v1/chat/completions"
            headers = {"Content-Type": "application/json"}
            async with net.client.post(url, data=raw, headers=headers) as response:
                assert response.status == 200
            assert seen == [raw]
            assert net.encoder.bodies == []

    run(test)


def test_stream_is_passed_through_as_it_comes() -> None:
    """The client has the first event while the decoder still withholds the second."""
    go_on = asyncio.Event()
    events = [b'data: {"n": 1}\n\n', b": comment\n\ndata: [DONE]\n\n"]

    async def streaming(received: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Own": "1"})
        await response.prepare(received)
        await response.write(events[0])
        await go_on.wait()
        await response.write(events[1])
        return response

    async def test() -> None:
        async with network([announcing({"h": entry(0)})], [streaming]) as net:
            body = request(image("a"), stream=True, stream_options={"include_usage": True})
            async with net.chat(body) as response:
                assert response.headers["Content-Type"] == "text/event-stream"
                assert response.headers["X-Own"] == "1"
                assert await response.content.readexactly(len(events[0])) == events[0]
                go_on.set()
                assert await response.read() == events[1]
            assert net.encoder.bodies[0]["stream"] is False
            assert "stream_options" not in net.encoder.bodies[0]
            assert net.decoder.bodies[0]["stream"] is True

    run(test)


def test_error_of_the_decoder_is_passed_through() -> None:
    """Status, body and headers of a refusal reach the client unchanged."""

    async def refusing(_received: web.Request) -> web.Response:
        return web.Response(status=422, body=b'{"error": "no"}', headers={"Retry-After": "3"})

    async def test() -> None:
        async with network([announcing({"h": entry(0)})], [refusing]) as net:
            async with net.chat(request(image("a"))) as response:
                assert (response.status, await response.read()) == (422, b'{"error": "no"}')
                assert response.headers["Retry-After"] == "3"
            await net.metric_becomes('vllm:ec_proxy_requests_total{kind="media",status="422"}', 1)

    run(test)


async def _failing(_received: web.Request) -> web.Response:
    return web.Response(status=500, text="encoder broke")


async def _not_json(_received: web.Request) -> web.Response:
    return web.Response(text="<html>")


async def _endless(received: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(received)
    while True:
        await response.write(b" " * 4096)


async def _redirecting(_received: web.Request) -> web.Response:
    return web.Response(status=307, headers={"Location": "http://127.0.0.1:9/"})


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (_failing, "status"),
        (_redirecting, "status"),
        (_not_json, "bad_reply"),
        (_endless, "bad_reply"),
        (announcing(["not an object"]), "bad_reply"),
        (announcing(None), "empty"),
        (announcing({}), "empty"),
        (never, "timeout"),
        (None, "unreachable"),
    ],
)
def test_without_an_encoding_the_decoder_gets_the_media(
    answer: Handler | None,
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever is wrong with the encoder, the answer comes; counted and logged by reason."""
    monkeypatch.setattr(upstream, "MAX_REPLY", 64 * 1024)
    body = request(image("a"), ec_transfer_params={"h": entry(0, peer_host="10.6.6.6")})
    options: dict[str, Any] = {"metadata_only": True}
    if answer is None:
        options["encode"] = (Address(closed_port()),)
    if outcome == "timeout":
        options["encode_timeout"] = 0.05

    async def test() -> None:
        async with network([answer or never], [answering], **options) as net:
            async with net.chat(body, headers={"X-Request-Id": "req-1"}) as response:
                assert response.status == 200
            assert net.decoder.bodies == [request(image("a"))]
            assert await net.metric(f'vllm:ec_proxy_encodes_total{{outcome="{outcome}"}}') == 1
            assert await net.metric('vllm:ec_proxy_encodes_total{outcome="ok"}') == 0

    run(test)
    lines = [record.getMessage() for record in caplog.records if "encoding failed" in record.msg]
    assert len(lines) == 1
    assert f"reason={outcome}" in lines[0]
    assert "req-1" in lines[0]


def test_addresses_from_a_client_never_reach_a_decoder() -> None:
    """``ec_transfer_params`` of the client is dropped from a text request too."""

    async def test() -> None:
        async with network([never], [answering]) as net:
            async with net.chat(request(ec_transfer_params={"h": entry(0)})) as response:
                assert response.status == 200
            assert net.decoder.bodies == [request()]

    run(test)


def test_two_images_keep_their_order() -> None:
    """Both images go to one encoder in one request; the announcement passes unchanged."""
    params = {"hash-b": entry(1), "hash-a": entry(0)}

    async def test() -> None:
        async with network([announcing(params)], [answering], metadata_only=False) as net:
            async with net.chat(request(image("a"), image("b"))) as response:
                assert response.status == 200
            named = identified(request(image("a"), image("b")))["messages"]
            assert net.decoder.bodies[0]["messages"] == named
            assert net.encoder.bodies[0]["messages"][0]["content"] == named[0]["content"][:2]
            assert net.decoder.bodies[0]["ec_transfer_params"] == params
            assert await net.metric("vllm:ec_proxy_items_announced_total") == 2

    run(test)


def test_metadata_only_replaces_the_media_for_the_decoder() -> None:
    """Two images, one of them twice: three parts with the identifiers in prompt order."""
    uuids = {
        name: identified(request(image(name)))["messages"][0]["content"][0]["uuid"]
        for name in ("a", "b")
    }
    params = {uuids["b"]: entry(1), uuids["a"]: entry(0)}  # it is shown each of them once
    sent = {uuids["b"]: entry(1), uuids["a"]: entry(0, 2)}

    def part(name: str) -> dict[str, Any]:
        grid = {"image_grid_thw": [1, 4, 4]}
        return {"type": "image_embeds", "image_embeds": grid, "uuid": uuids[name]}

    async def test() -> None:
        async with network([announcing(params)], [answering], metadata_only=True) as net:
            async with net.chat(request(image("a"), image("b"), image("a"))) as response:
                assert response.status == 200
            assert net.decoder.bodies == [
                request(part("a"), part("b"), part("a"), ec_transfer_params=sent)
            ]
            assert await net.metric("vllm:ec_proxy_items_replaced_total") == 3

    run(test)


def test_metadata_only_keeps_media_of_an_item_that_was_not_announced() -> None:
    """One of two images has no address: both stay, and the announcement still passes."""
    params = {"hash-a": entry(0), "hash-b": {"item_indices": [1], "metadata": {}}}

    async def test() -> None:
        async with network([announcing(params)], [answering], metadata_only=True) as net:
            body = request(image("a"), image("b"))
            async with net.chat(body) as response:
                assert response.status == 200
            assert net.decoder.bodies == [{**identified(body), "ec_transfer_params": params}]
            assert await net.metric("vllm:ec_proxy_items_announced_total") == 1
            assert await net.metric("vllm:ec_proxy_items_replaced_total") == 0

    run(test)


@pytest.mark.parametrize("stage", ["encoder", "decoder"])
def test_client_that_goes_away_cancels_the_servers(stage: str) -> None:
    """Closing the connection during either hop ends the request at that server."""
    encode = never if stage == "encoder" else announcing({"h": entry(0)})

    async def test() -> None:
        async with network([encode], [never]) as net:
            fake = net.encoder if stage == "encoder" else net.decoder
            call = asyncio.create_task(net.chat(request(image("a"))).__aenter__())
            await fake.entered.wait()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            await fake.cancelled.wait()
            await net.metric_becomes("vllm:ec_proxy_client_disconnects_total", 1)
            await net.metric_becomes("vllm:ec_proxy_num_requests_running", 0)
            assert len(net.decoder.bodies) == (0 if stage == "encoder" else 1)

    run(test)


def test_client_that_goes_away_in_mid_stream_cancels_the_decoder() -> None:
    """A stream that nobody reads is ended, though its server is silent just then."""

    async def streaming(received: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(received)
        await response.write(b"data: 1\n\n")
        return await never(received)

    async def test() -> None:
        async with network([never], [streaming]) as net:
            async with net.chat(request(stream=True)) as response:
                await response.content.readany()
                response.close()
            await net.decoder.cancelled.wait()

    run(test)


def test_decoder_that_cannot_be_reached_is_a_502() -> None:
    """The client gets an OpenAI error body, not a broken connection."""

    async def test() -> None:
        async with network([never], [never], decode=(Address(closed_port()),)) as net:
            async with net.chat(request()) as response:
                assert response.status == 502
                error = (await response.json())["error"]
            assert error["code"] == 502
            assert "decoding server" in error["message"]
            await net.metric_becomes('vllm:ec_proxy_requests_total{kind="text",status="502"}', 1)

    run(test)


def test_silent_decoder_is_a_504() -> None:
    """Silence beyond the limit ends the request, at the server too."""

    async def test() -> None:
        async with network([never], [never], decode_timeout=0.05) as net:
            async with net.chat(request()) as response:
                assert response.status == 504
            await net.decoder.cancelled.wait()

    run(test)


def test_answer_that_breaks_off_breaks_off_at_the_client(caplog: pytest.LogCaptureFixture) -> None:
    """Half an answer never looks whole: the client's read fails, and the log says why."""

    async def breaking(received: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(received)
        await response.write(b"data: 1\n\n")
        assert received.transport is not None
        received.transport.abort()
        return response

    async def test() -> None:
        async with network([never], [breaking]) as net, net.chat(request()) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()

    run(test)
    assert "broke off" in caplog.text


def test_headers_are_the_clients_and_cookies_are_not_shared() -> None:
    """Authorization passes on both hops; one client's cookie is not sent for the next."""

    async def with_cookie(_received: web.Request) -> web.Response:
        return web.Response(body=b"{}", headers={"Set-Cookie": "who=first", "Server": "vllm"})

    async def test() -> None:
        # By name: aiohttp keeps no cookies of a bare address anyway.
        announce = announcing({"h": entry(0)})
        async with network([announce], [with_cookie], name="localhost") as net:
            headers = {"Authorization": "Bearer k", "Connection": "close, X-Hop", "X-Hop": "1"}
            async with net.chat(request(image("a")), headers=headers) as response:
                assert response.headers["Set-Cookie"] == "who=first"
                assert response.headers.getall("Server") == ["vllm"]
            net.client.cookie_jar.clear()
            async with net.chat(request()) as response:
                assert response.status == 200
            first, second = net.decoder.headers
            assert first["Authorization"] == net.encoder.headers[0]["Authorization"] == "Bearer k"
            assert first["X-Request-Id"] == net.encoder.headers[0]["X-Request-Id"]
            assert first["X-Request-Id"] != second["X-Request-Id"]
            assert "X-Hop" not in first
            assert "Cookie" not in second
            assert "Authorization" not in second

    run(test)


def test_compressed_answer_is_not_touched() -> None:
    """The bytes and their encoding pass as they are."""
    packed = gzip.compress(b'{"choices": []}')

    async def compressed(_received: web.Request) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    async def test() -> None:
        async with network([never], [compressed]) as net, net.chat(request()) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            assert await response.read() == packed

    run(test)


def test_servers_take_turns_on_connections_of_their_own() -> None:
    """Different pictures go both ways in the end; no idle connection is used again."""
    announce = announcing({"h": entry(0)})

    async def test() -> None:
        async with network([announce, announce], [answering, answering]) as net:
            for number in range(32):
                async with net.chat(request(image(f"picture{number}"))) as response:
                    assert response.status == 200
            assert [len(fake.bodies) for fake in net.decoders] == [16, 16]
            assert all(fake.bodies for fake in net.encoders)
            for fake in (*net.encoders, *net.decoders):
                assert len(set(fake.peers)) == len(fake.peers)

    run(test)


def test_requests_too_large_are_refused_before_they_are_read() -> None:
    """413 for a declared and for an undeclared size; nothing reaches a server."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 1024

    async def test() -> None:
        async with network([never], [never], max_body=32 * 1024) as net:
            url = f"{net.url}/v1/chat/completions"
            for data in (b" " * 40 * 1024, chunks()):
                async with net.client.post(url, data=data) as response:
                    assert response.status == 413
            assert net.encoder.bodies == net.decoder.bodies == []

    run(test)


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_body_that_is_not_an_object_is_a_400(raw: bytes) -> None:
    """Nonsense, also deeply nested, is refused here and the router lives on."""

    async def test() -> None:
        async with network([never], [answering]) as net:
            url = f"{net.url}/v1/chat/completions"
            async with net.client.post(url, data=raw) as response:
                assert response.status == 400
            async with net.chat(request()) as response:
                assert response.status == 200

    run(test)


def test_health_and_models() -> None:
    """Ready while a decoder is, even without encoders; models are the decoder's."""

    async def models(_received: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def test() -> None:
        down = closed_port()
        async with network([never], [models], encode=(Address(down),)) as net:
            async with net.client.get(f"{net.url}/ready") as response:
                assert response.status == 200
                assert await response.json() == {"healthy": {down: False, net.decoder.url: True}}
            async with net.client.get(f"{net.url}/v1/models") as response:
                assert await response.json() == {"data": [{"id": "m"}]}
            async with net.client.get(f"{net.url}/instances") as response:
                described = (await response.json())["instances"]
            assert [(one["role"], one["url"]) for one in described] == [
                ("encode", down),
                ("decode", net.decoder.url),
            ]
            assert {one["state"] for one in described} == {"serving"}
        async with (
            network([never], [models], decode=(Address(down),)) as net,
            net.client.get(f"{net.url}/ready") as response,
        ):
            assert response.status == 503
            async with net.client.get(f"{net.url}/health") as alive:
                assert alive.status == 200

    run(test)


@pytest.mark.parametrize("path", ["completions", "responses", "messages"])
def test_other_routes_reach_a_decoder(path: str) -> None:
    """Path, query, unknown fields and headers pass; the answer loses transfer parameters only."""
    body = {"model": "m", "prompt": "hello", "unknown": {"a": 1}}
    answer = {"id": "r", "kept": 1.5, "ec_transfer_params": {"h": entry(0)}}

    async def with_params(_received: web.Request) -> web.Response:
        return web.json_response(answer, headers={"X-Own": "1"})

    async def test() -> None:
        async with network([never], [with_params]) as net:
            url = f"{net.url}/v1/{path}?beta=true"
            given = {**body, "ec_transfer_params": {"h": entry(0)}}
            async with net.client.post(url, json=given, headers={"X-Api-Key": "k"}) as response:
                assert response.headers["X-Own"] == "1"
                assert await response.json() == {"id": "r", "kept": 1.5}
            assert net.decoder.bodies == [body]
            assert net.decoder.headers[0]["X-Api-Key"] == "k"
            assert net.decoder.targets == [f"/v1/{path}?beta=true"]

    run(test)


def test_error_at_the_start_of_a_stream_is_passed_through() -> None:
    """Its status is 200 by then, as the server's; every byte of it arrives."""
    events = b'data: {"error": {"message": "no", "code": 500}}\n\ndata: [DONE]\n\n'

    async def failing(_received: web.Request) -> web.Response:
        return web.Response(body=events, headers={"Content-Type": "text/event-stream"})

    async def test() -> None:
        async with network([never], [failing]) as net, net.chat(request(stream=True)) as response:
            assert (response.status, await response.read()) == (200, events)

    run(test)


def test_options_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TOML and JSON, names with either dash; the command line stands above it."""
    toml = tmp_path / "router.toml"
    toml.write_text(
        'encode = ["http://a:1", "http://b:2#ranks=4"]\ndecode = "http://c:3"\nport = 8080\n'
        'encode-timeout = "500ms"\nmax_body = "1MiB"\nmetadata_only = true\n'
    )
    options = parse_options(["--config", str(toml), "--decode", "http://d", "--port", "0"])
    assert options == Options(
        encode=(Address("http://a:1"), Address("http://b:2", ranks=4)),
        decode=(Address("http://d"),),
        port=0,
        metadata_only=True,
        encode_timeout=0.5,
        max_body=1024 * 1024,
    )
    file = tmp_path / "router.json"
    for text, said in {
        '{"encodes": []}': "unknown option 'encodes': did you mean 'encode'?",
        '{"decode": {"a": 1}}': "neither text nor a number",
        '{"port": "high"}': "'high' is not a port",
        '{"port": 1}': "--encode is missing",
        "[]": "not an object",
        "{": "Expecting",
    }.items():
        file.write_text(text)
        with pytest.raises(SystemExit) as ended:
            parse_options(["--config", str(file)])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_options_of_the_command_line() -> None:
    """Servers may be repeated or listed; sizes and the root URLs are normalised."""
    encode = ["--encode", "http://a:1", "http://b:2/", "--encode", "https://c"]
    others = ["--decode", "http://[::1]:3", "--port", "0", "--metadata-only", "--max-body", "2MiB"]
    options = parse_options([*encode, *others])
    assert options == Options(
        encode=(Address("http://a:1"), Address("http://b:2"), Address("https://c")),
        decode=(Address("http://[::1]:3"),),
        port=0,
        metadata_only=True,
        max_body=2 * 1024 * 1024,
    )


def test_page_names_every_option() -> None:
    """docs/router.md has each option with its default, in order."""
    page = (Path(__file__).parents[2] / "docs" / "router.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? \|", page, re.MULTILINE)
    expected = []
    for field in fields(Options):
        value: Any = "" if field.default in (MISSING, ()) else field.default
        if isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, float):
            value = format_duration(value)
        elif field.name in ("max_body", "max_bytes"):
            value = format_size(value)
        expected.append((field.name, str(value)))
    assert sorted(rows) == sorted(expected)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--port", "65536"],
        ["--encode-timeout", "0"],
        ["--max-body", "0"],
        ["--decode", "http://b/v1"],
        ["--decode", "b:80"],
        ["--decode", "http://b:99999"],
        ["--decode", "http://b:abc"],
        ["--decode", "http://b c"],
        ["--host", ""],
        ["--decode", "http://b#rank=4"],
        ["--decode", "http://b#ranks=0"],
        ["--nope"],
    ],
)
def test_wrong_options_end_with_status_2(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad usage is status 2, and the message names the option."""
    with pytest.raises(SystemExit) as ended:
        main(["--encode", "http://a", "--decode", "http://b", *wrong])
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_no_password_of_a_url_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Addresses stand in logs, so one with a password is refused, without repeating it."""
    with pytest.raises(SystemExit) as ended:
        main(["--encode", "http://user:hunter2@a", "--decode", "http://b"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "user or password" in shown
    assert "hunter2" not in shown


def test_port_in_use_ends_with_status_1(caplog: pytest.LogCaptureFixture) -> None:
    """The message names the address that is taken."""
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--encode", "http://a", "--decode", "http://b", "--port", port]) == 1
    assert f"127.0.0.1 port {port}" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_process_says_where_it_listens_and_ends_in_order(number: signal.Signals) -> None:
    """``python -m ec_connector.proxy``: a free port is told, either signal ends it with 0."""
    command = [sys.executable, "-m", "ec_connector.proxy", "--port", "0"]
    servers = ["--encode", closed_port(), "--decode", closed_port()]
    with subprocess.Popen([*command, *servers], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            address = line.partition("router on http://")[2].partition(",")[0]
            host, _, port = address.partition(":")
            with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
                connection.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                connection.settimeout(PATIENCE)
                assert b" 503 " in connection.recv(4096).split(b"\r\n")[0]
            process.send_signal(number)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_importing_the_package_needs_no_extra() -> None:
    """``import ec_connector.proxy`` and its options load neither aiohttp nor starlette."""
    code = (
        "import sys, ec_connector.proxy.rewrite, ec_connector.proxy.options as o;"
        "o.parse_options(['--encode', 'http://a', '--decode', 'http://b']);"
        "sys.exit(bool({'aiohttp', 'starlette', 'uvicorn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
