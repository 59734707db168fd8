# SPDX-License-Identifier: Apache-2.0
"""Pulling against encoding again: the arithmetic, the words, and a run against small servers."""

from __future__ import annotations

import io
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich", reason="the command's tables; it is in the cli extra")

from rich.console import Console

from ec_connector import Consumer, Producer
from ec_connector.bench import app, compare
from ec_connector.bench.ours import BenchError
from ec_connector.bench.pulls import Pictures, measure
from ec_connector.bench.weigh import (
    Comparison,
    Move,
    Trip,
    codec_limit,
    on_link,
    parts,
    slowest_link,
    weigh,
)
from ec_connector.bench.weighed import plot, show, show_rate

ZMQ = Move("zmq", "none", [0.004, 0.002, 0.003], 1e6, 1e6)
ZSTD = Move("zmq", "zstd", [0.013, 0.013, 0.013], 1e6, 0.6e6)
MEMORY = Move("memory", "none", [0.001], 1e6, 0)
TRIPS = [
    Trip(encode=0.2, pulled=0.053, fetch=0.003, local=0.1),
    Trip(encode=0.3, pulled=0.055, fetch=0.005, local=0.16),
    Trip(encode=0.1, pulled=0.059, fetch=0.009, local=0.15),
]


# ── arithmetic ───────────────────────────────────────────────────────────────


def test_parts() -> None:
    """Rest is what a pull takes beside its fetch; the encoder run is what local takes beside it."""
    whole = parts(TRIPS)
    assert whole.rest == pytest.approx(0.05)
    assert (whole.encode, whole.pulled, whole.fetch, whole.local) == (0.2, 0.055, 0.005, 0.15)
    assert whole.own_encode == pytest.approx(0.1)


def test_slowest_link() -> None:
    """A megabyte in what is left of the encoder run; nothing left: never; no bytes: any link."""
    assert slowest_link(1e6, 0.003, 0.103) == pytest.approx(10e6)
    assert slowest_link(0, 0.003, 0.103) == 0
    assert slowest_link(1e6, 0.1, 0.1) is None
    assert slowest_link(0, 0.2, 0.1) is None


def test_codec_limit() -> None:
    """0.4 MB saved for 10 ms: 40 MB/s. Nothing saved: none. No cost: any link."""
    assert codec_limit(ZMQ, ZSTD) == pytest.approx(40e6)
    assert codec_limit(ZMQ, Move("zmq", "lz4", [0.01], 1e6, 1e6)) is None
    assert codec_limit(ZMQ, Move("zmq", "lz4", [0.001], 1e6, 0.9e6)) == math.inf


def test_weigh() -> None:
    """At the slowest link that pays, pulling and encoding again take as long."""
    comparison = Comparison(TRIPS, [MEMORY, ZMQ, ZSTD, Move("zmq", "lz4", refused="no")])
    balances = {balance.move.name: balance for balance in weigh(comparison)}
    assert list(balances) == ["memory", "zmq", "zmq, zstd"]
    whole = parts(TRIPS)
    for name in ("zmq", "zmq, zstd"):
        pays_from = balances[name].pays_from
        assert pays_from is not None
        assert on_link(balances[name], whole.rest, pays_from) == pytest.approx(whole.local)
    assert balances["memory"].pays_from == 0
    assert balances["memory"].codec_pays_below is None
    assert balances["zmq"].first_token == pytest.approx(0.053)
    limit = balances["zmq, zstd"].codec_pays_below
    assert limit is not None
    times = [on_link(balances[name], whole.rest, limit) for name in ("zmq", "zmq, zstd")]
    assert times[0] == pytest.approx(times[1])


def test_nothing_measured() -> None:
    """No figures are made up."""
    with pytest.raises(ValueError, match="no values"):
        weigh(Comparison([], [ZMQ]))


def test_noise() -> None:
    """Where times differ by more than the encoder run takes, nothing is concluded from them."""
    assert not parts(TRIPS).noisy
    wild = [*TRIPS, Trip(0.1, 0.5, 0.01, 0.15), Trip(0.1, 0.6, 0.01, 0.15)]
    whole = parts(wild)
    assert whole.spread == pytest.approx(0.44)
    assert whole.noisy
    out = io.StringIO()
    show(Console(file=out, width=200), Comparison(wild, [ZMQ]))
    assert "no answer: the encoder run" in out.getvalue()
    assert "stops paying" not in out.getvalue()
    assert "?" in out.getvalue()


# ── words and pictures ───────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rate", "text"), [(125e6, "1 Gbit/s"), (1.5e6, "12 Mbit/s"), (100, "0.8 kbit/s")]
)
def test_rates(rate: float, text: str) -> None:
    """In bits, as links are sold."""
    assert show_rate(rate) == text


def test_shown() -> None:
    """Each way, its limit, and what could not be had."""
    out = io.StringIO()
    slow = Move("zmq", "lz4", [0.5], 1e6, 0.9e6)
    comparison = Comparison(TRIPS, [MEMORY, ZMQ, ZSTD, slow], notes=["a note"])
    show(Console(file=out, width=140), comparison)
    text = out.getvalue()
    assert "memory: pays; no link is passed" in text
    assert "zmq: stops paying below 82.5 Mbit/s" in text
    assert "320 Mbit/s" in text  # below which zstd beats none
    assert "zmq, lz4: does not pay, not even here: the fetch takes 500 ms" in text
    assert "note: a note" in text


def test_drawn(tmp_path: Path) -> None:
    """A picture of the kind that its name says."""
    pytest.importorskip("matplotlib", reason="plots; it is in the bench extra")
    plot(Comparison(TRIPS, [MEMORY, ZMQ, ZSTD]), tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(ValueError, match="no values"):
        plot(Comparison([], [ZMQ]), tmp_path / "b.svg")


# ── a run ────────────────────────────────────────────────────────────────────


class Handler(BaseHTTPRequestHandler):
    """What an encoder and a decoder have in common."""

    server: Server

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        kind, reply = self.server.reply(body)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def do_GET(self) -> None:
        reply = "".join(f"{name} {value}\n" for name, value in self.server.counted.items())
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply.encode())


class Server(ThreadingHTTPServer):
    """An HTTP server in a thread, and what it was asked."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.counted: dict[str, float] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=[0.02])
        self._thread.start()

    def reply(self, body: dict[str, Any]) -> tuple[str, bytes]:
        """Content type and content."""
        raise NotImplementedError

    def end(self) -> None:
        """Stop serving."""
        self.shutdown()
        self._thread.join()
        self.server_close()


class Encoder(Server):
    """Puts rows into the pool of a real agent for each picture, and announces them."""

    def __init__(self, **settings: Any) -> None:
        self.producer = Producer(pool_size="16MiB", **settings)
        self.announces = True
        super().__init__()

    def reply(self, body: dict[str, Any]) -> tuple[str, bytes]:
        url = body["messages"][0]["content"][0]["image_url"]["url"]
        rows = np.zeros((64, 512), np.float16)
        announced = {url[-24:]: self.producer.put(url[-24:], rows)} if self.announces else {}
        message = {"choices": [{"message": {"content": "x"}}], "ec_transfer_params": announced}
        return "application/json", json.dumps(message).encode()

    def end(self) -> None:
        super().end()
        self.producer.close()


class Decoder(Server):
    """Fetches what is announced with a real agent, and answers with one token."""

    def __init__(self) -> None:
        self.consumer = Consumer(pool_size="16MiB")
        self.pulls = True
        super().__init__()
        for name in ("fetched_items", "hit_items", "fetch_time_seconds"):
            suffix = "sum" if "seconds" in name else "total"
            self.counted[f"vllm:ec_pool_{name}_{suffix}"] = 0

    def reply(self, body: dict[str, Any]) -> tuple[str, bytes]:
        for key, entry in body.get("ec_transfer_params", {}).items() if self.pulls else ():
            self.consumer.fetch(key, entry, timeout=10.0)
            self.counted["vllm:ec_pool_fetched_items_total"] += 1
            self.counted["vllm:ec_pool_fetch_time_seconds_sum"] += 0.001
        message = {"choices": [{"token_ids": [7], "delta": {"content": "x"}}]}
        return "text/event-stream", b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(message).encode()

    def end(self) -> None:
        super().end()
        self.consumer.close()


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    """One that has a codec."""
    pytest.importorskip("zstandard", reason="codec zstd; it is in the test extra")
    server = Encoder(codecs=["zstd", "none"])
    yield server
    server.end()


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    """One that pulls."""
    server = Decoder()
    yield server
    server.end()


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A file; nobody here looks at it as a picture."""
    path = tmp_path / "picture.jpg"
    path.write_bytes(b"\xff\xd8 not much of a picture")
    return path


def test_a_run(encoder: Encoder, decoder: Decoder, picture: Path, tmp_path: Path) -> None:
    """Every way is fetched by, every picture is new, and refusals are told."""
    ways = [("memory", "none"), ("zmq", "none"), ("zmq", "zstd"), ("zmq", "lossy-int8-rows")]
    pictures = Pictures([picture], tmp_path)
    comparison = measure(encoder.url, decoder.url, pictures, ways, rounds=3, settings={})
    assert len(comparison.trips) == 3
    assert all(trip.fetch == pytest.approx(0.001) for trip in comparison.trips)
    memory, plain, packed, lossy = comparison.moves
    assert (len(memory.seconds), memory.nbytes, memory.link_nbytes) == (3, 65536, 0)
    assert (len(plain.seconds), plain.link_nbytes) == (3, 65536)
    assert 0 < packed.link_nbytes < 1000
    assert lossy.seconds == []
    assert "loss differs" in lossy.refused
    assert any("loss differs" in note for note in comparison.notes)
    sent = (*encoder.bodies, *decoder.bodies)
    seen = [json.dumps(body["messages"][0]["content"][0]) for body in sent]
    assert len(set(seen)) == 8  # four pulled, each shown to both, and four encoded again
    assert [body["stream"] for body in encoder.bodies] == [False] * 4
    weigh(comparison)


def test_a_decoder_that_does_not_pull(
    encoder: Encoder,
    decoder: Decoder,
    picture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answers are no measurement."""
    monkeypatch.setattr("ec_connector.demo.readings.SETTLE_SECONDS", 0.1)
    decoder.pulls = False
    pictures = Pictures([picture], tmp_path)
    comparison = measure(encoder.url, decoder.url, pictures, [], rounds=2, settings={})
    assert comparison.trips == []
    assert len([note for note in comparison.notes if "did not pull it" in note]) == 2


def test_an_encoder_that_announces_nothing(
    encoder: Encoder, decoder: Decoder, picture: Path, tmp_path: Path
) -> None:
    """Said at once, with what to look at."""
    encoder.announces = False
    with pytest.raises(BenchError, match=r"announces nothing.*ec_producer"):
        measure(encoder.url, decoder.url, Pictures([picture], tmp_path), [], rounds=1, settings={})


def test_nobody_there(picture: Path, tmp_path: Path) -> None:
    """The URL is named."""
    url = "http://127.0.0.1:9"
    with pytest.raises(BenchError, match=r"127\.0\.0\.1:9 does not answer"):
        measure(url, url, Pictures([picture], tmp_path), [], rounds=1, settings={})


# ── the command ──────────────────────────────────────────────────────────────


def test_command(
    encoder: Encoder, decoder: Decoder, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From options to JSON on standard output, the tables beside it."""
    words = ["compare", "--encode", encoder.url, "--decode", decoder.url + "/", "--json", "-"]
    words += ["--image", str(picture), "--rounds", "2", "--codec", "none", "--codec", "zstd"]
    assert app.main(words) == compare.GOOD
    out, told = capsys.readouterr()
    written = json.loads(out)
    assert [move["codec"] for move in written["moves"]] == ["none", "none", "zstd"]
    assert len(written["trips"]) == 2
    assert written["command"].startswith("ec-connector bench compare --encode http")
    assert "time to first token" in told


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--encode", "http://x"],
        ["--demo", "--encode", "http://x", "--decode", "http://y"],
        ["--demo", "--rounds", "0"],
        ["--demo", "--codec", "gzip"],
        ["--demo", "--image", "/nowhere.png"],
        ["--demo", "--config", "[]"],
        ["--demo", "--config", "{"],
    ],
)
def test_wrong_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and why."""
    try:
        status = compare.main(words)
    except SystemExit as error:
        status = error.code  # type: ignore[assignment]
    assert status == compare.USAGE
    assert capsys.readouterr().err


def test_wrong_settings(
    encoder: Encoder, decoder: Decoder, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the fetches made here: one line, and exit status 1."""
    words = ["--encode", encoder.url, "--decode", decoder.url, "--image", str(picture)]
    assert compare.main([*words, "--config", '{"port": "x"}']) == compare.PROBLEM
    assert "port='x'" in capsys.readouterr().err


def test_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs on the plane that passes a link; those without their library are told."""
    monkeypatch.setitem(__import__("sys").modules, "lz4", None)
    ways, notes = compare.ways_of(["none", "lz4"])
    assert ways == [("memory", "none"), ("zmq", "none")]
    assert notes == ["lz4 is not measured: pip install 'ec-connector[lz4]'"]
