# SPDX-License-Identifier: Apache-2.0
"""Time to the first token: one ordinary vLLM beside the router with an encoder and a decoder.

    python bench/first_token.py [--rounds 12] [--json FILE]

A tiny Qwen2-VL made here, with a vision tower of some layers so that encoding costs something;
pictures of 640 x 480 with bytes behind their end that no server has seen, so that no cache
helps; one request at a time, streamed, at temperature 0. Three sets of at most three engines,
and within a set all ways by turns:

1. the pair on this host, beside one vLLM, each engine on one core;
2. the decoder behind a link of 1 Gbit/s (a network namespace and the tbf queue: needs root and
   iproute2, and is left out without), beside one vLLM that has all cores;
3. two encoders at work on one request, without and with hints (the decoder registers at one of
   two routers, which tells its agent at once what an encoder has announced).

Before each request the engines rest: a worker of vLLM spins for a second after its last step,
and would take time from the next one's. Needs vLLM and the extras of the demo.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from ec_connector.bench.pulls import unseen
from ec_connector.bench.stats import median, quantile
from ec_connector.demo.chat import Answer, Body, ask, chat_body
from ec_connector.demo.crew import CONSUMER, PRODUCER, Crew
from ec_connector.demo.models import make_qwen2_vl
from ec_connector.demo.questions import PROMPT, Album
from ec_connector.demo.readings import (
    COUNTING_ENV,
    COUNTING_OPTIONS,
    encoded_pictures,
    growth,
    metrics,
)
from ec_connector.demo.servers import Server, Servers, free_ports, vllm_command, vllm_env
from ec_connector.proxy.rewrite import decode_body, encode_body, metadata_only

PICTURES = (1, 8)
MOST = max(PICTURES)
UNCOUNTED = 2
"""Rounds that warm everything up."""
TOKENS = 8
REST = 1.3
"""Seconds: longer than a worker spins."""
VISION_LAYERS = 6

ONE, ROUTER, BOTH, HAND = "one vLLM", "router", "router, pictures to both", "pair without router"
HINTS = "router, decoder told ahead"
HERE, FAR, TWO = "same host", "1 Gbit/s", "two encoders"

_FETCH = "vllm:ec_pool_fetch_time_seconds"
_TOLD = "vllm:ec_proxy_ahead_hints_total"

NAMESPACE, CABLE = "ec-bench-far", "ec-bench0"
NEAR_ADDRESS, FAR_ADDRESS, NETWORK = "10.99.1.1", "10.99.1.2", "10.99.1.0/24"


class Taken(NamedTuple):
    """One request. Seconds; ``encode`` and ``decode``: its two parts where the pair is asked
    without the router, else 0."""

    first_token: float
    tokens: tuple[int, ...]
    encode: float = 0.0
    decode: float = 0.0


class Row(msgspec.Struct, frozen=True):
    """One line of the table. Milliseconds; ``same``: answers with the tokens of the set's first
    way to the same pictures. ``encode_ms``, ``decode_ms``: medians of the two parts."""

    where: str
    way: str
    pictures: int
    n: int
    median_ms: float
    p90_ms: float
    same: int
    encode_ms: float | None = None
    decode_ms: float | None = None


class Found(msgspec.Struct):
    """A run. ``fetch_ms``: mean time that a decoder took to fetch an item, by set."""

    facts: dict[str, Any]
    rows: list[Row]
    fetch_ms: dict[str, float]
    notes: list[str]


def row(where: str, way: str, pictures: int, taken: Sequence[Taken], like: Sequence[Taken]) -> Row:
    """The line of one way. Raises ValueError without requests."""
    times = sorted(one.first_token for one in taken)
    parts = [one for one in taken if one.encode]
    return Row(
        where,
        way,
        pictures,
        len(times),
        _ms(median(times)),
        _ms(quantile(times, 0.9)),
        sum(one.tokens == other.tokens for one, other in zip(taken, like, strict=True)),
        _ms(median([one.encode for one in parts])) if parts else None,
        _ms(median([one.decode for one in parts])) if parts else None,
    )


def table(rows: Sequence[Row]) -> Table:
    """The lines for people."""
    shown = Table(title="time to the first token, ms", title_justify="left")
    shown.add_column("where")
    shown.add_column("way")
    for name in ("pictures", "median", "p90", "encode", "decode", "same tokens"):
        shown.add_column(name, justify="right")
    for one in rows:
        parts = ["" if ms is None else f"{ms:.0f}" for ms in (one.encode_ms, one.decode_ms)]
        times = [f"{one.median_ms:.0f}", f"{one.p90_ms:.0f}"]
        same = f"{one.same} of {one.n}"
        shown.add_row(one.where, one.way, str(one.pictures), *times, *parts, same)
    return shown


def order(names: Sequence[str], turn: int) -> list[str]:
    """The ways of one round: another begins each time."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


class Pictures:
    """Requests about pictures that no server has seen, the same ones in each round."""

    def __init__(self, folder: Path) -> None:
        album = Album(folder)
        self._files = [album.photo() for _ in range(2 * MOST)]
        self._folder = folder

    def body(self, count: int, turn: int) -> Body:
        """The request of a round."""
        paths = []
        for number in range(count):
            file = self._files[(turn + number) % len(self._files)]
            paths.append(unseen(file, self._folder / f"asked-{number}{file.suffix}"))
        return chat_body(paths, PROMPT, max_tokens=TOKENS)


Way = Callable[[Body], Taken]


def direct(server: Server) -> Way:
    """Ask one server."""

    def answer(body: Body) -> Taken:
        found = _answered(server, body)
        return Taken(found.first_token, tuple(found.token_ids))

    return answer


def by_hand(encoder: Server, decoder: Server) -> Way:
    """Ask an encoder and a decoder as the router does, but from here."""

    def answer(body: Body) -> Taken:
        first = _answered(encoder, encode_body(body))
        plain, replaced = metadata_only(body, first.announced)
        if not replaced:
            raise SystemExit(f"no metadata was announced: {first.announced}")
        second = _answered(decoder, decode_body(plain, first.announced))
        total = first.whole + second.first_token
        return Taken(total, tuple(second.token_ids), first.whole, second.first_token)

    return answer


def _answered(server: Server, body: Body) -> Answer:
    answer = ask(server.url, body)
    if answer.status != 200:
        raise SystemExit(f"{server.name} answers {answer.status}: {answer.error}")
    return answer


def by_turns(
    where: str,
    ways: Mapping[str, Way],
    pictures: Pictures,
    rounds: int,
    tell: Callable[[str], None],
) -> list[Row]:
    """The lines of one set of engines."""
    taken: dict[tuple[int, str], list[Taken]] = {(n, way): [] for n in PICTURES for way in ways}
    for turn in range(rounds + UNCOUNTED):
        tell(f"{where}: round {turn + 1} of {rounds + UNCOUNTED}")
        for count in PICTURES:
            for way in order(list(ways), turn):
                body = pictures.body(count, turn)
                time.sleep(REST)
                one = ways[way](body)
                if turn >= UNCOUNTED:
                    taken[count, way].append(one)
    first = next(iter(ways))
    return [row(where, way, n, times, taken[n, first]) for (n, way), times in taken.items()]


class Engines:
    """Starts the engines of one set."""

    def __init__(self, servers: Servers, console: Console, model: Path) -> None:
        self._servers, self._model = servers, model
        self.crew = Crew(servers, console)

    def start(
        self,
        name: str,
        cores: str,
        ec: Mapping[str, Any] | None = None,
        *,
        far: bool = False,
        port: int = 0,
    ) -> Server:
        """An engine on these cores (``"0"``, ``"0-1"``), ``far``: behind the link."""
        port = port or free_ports(1)[0]
        host = ["--host", FAR_ADDRESS] if far else []
        command = vllm_command(self._model, port, *COUNTING_OPTIONS, *host, ec=ec)
        env = {**vllm_env(0), **COUNTING_ENV, "VLLM_CPU_OMP_THREADS_BIND": cores}
        if not far:
            return self._servers.start(name, command, port=port, env=env)
        command = ["ip", "netns", "exec", NAMESPACE, *command]
        env["VLLM_HOST_IP"] = FAR_ADDRESS
        return self._servers.start(name, command, port=port, host=FAR_ADDRESS, env=env)


def no_link() -> str:
    """Why there can be no link here, in words; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)} (iproute2)" if missing else ""


@contextlib.contextmanager
def link() -> Iterator[None]:
    """A network namespace at the other end of a cable of 1 Gbit/s. Raises CalledProcessError."""

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, text=True)

    far = ("ip", "-n", NAMESPACE)
    # A bucket much smaller than an item, which would else pass at once.
    tbf = ("root", "tbf", "rate", "1gbit", "burst", "128kb", "latency", "50ms")
    try:
        run("ip", "netns", "add", NAMESPACE)
        run("ip", "link", "add", CABLE, "type", "veth", "peer", CABLE, "netns", NAMESPACE)
        run("ip", "address", "add", f"{NEAR_ADDRESS}/24", "dev", CABLE)
        run(*far, "address", "add", f"{FAR_ADDRESS}/24", "dev", CABLE)
        run("ip", "link", "set", CABLE, "up")
        run(*far, "link", "set", CABLE, "up")
        run(*far, "link", "set", "lo", "up")
        run("tc", "qdisc", "replace", "dev", CABLE, *tbf)
        run("tc", "-n", NAMESPACE, "qdisc", "replace", "dev", CABLE, *tbf)
        yield
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False)


class Sets:
    """The three sets of engines, one after the other.

    Args:
        engines: starts them.
        pictures: what they are asked about.
        rounds: that count.
        found: gets the lines.
        tell: hears how far it is.
    """

    def __init__(
        self,
        engines: Engines,
        pictures: Pictures,
        rounds: int,
        found: Found,
        tell: Callable[[str], None],
    ) -> None:
        self._engines, self._crew = engines, engines.crew
        self._pictures, self._rounds, self._found, self._tell = pictures, rounds, found, tell
        cores = sorted(os.sched_getaffinity(0))
        self._first, self._last = str(cores[0]), str(cores[-1])
        self._every = f"{cores[0]}-{cores[-1]}"

    def here(self) -> None:
        """On this host, each engine on one core."""
        one = self._engines.start(ONE, self._first)
        encoder = self._engines.start("encoder", self._first, PRODUCER)
        decoder = self._engines.start("decoder", self._last, CONSUMER)
        router = self._crew.router(encoder, decoder)
        both = self._crew.router(encoder, decoder, "--no-metadata-only")
        self._crew.wait(one, encoder, decoder, router, both)
        ways = {ONE: direct(one), ROUTER: direct(router), BOTH: direct(both)}
        self._run(HERE, {**ways, HAND: by_hand(encoder, decoder)}, decoder)
        self._crew.stop(one, encoder, decoder, router, both)

    def far(self) -> None:
        """The decoder behind a link."""
        if why := no_link():
            self._found.notes.append(f"no link of 1 Gbit/s: {why}")
            return
        with link():
            one = self._engines.start(ONE, self._every)
            near = _settings(PRODUCER, bind_host=NEAR_ADDRESS)
            encoder = self._engines.start("encoder", self._first, near)
            away = _settings(CONSUMER, allow_peers=[NETWORK], planes=["zmq"])
            decoder = self._engines.start("decoder", self._last, away, far=True)
            router = self._crew.router(encoder, decoder)
            self._crew.wait(one, encoder, decoder, router)
            ways = {f"{ONE}, all cores": direct(one), ROUTER: direct(router)}
            self._run(FAR, {**ways, HAND: by_hand(encoder, decoder)}, decoder)
            self._crew.stop(one, encoder, decoder, router)

    def two(self, token: Path) -> None:
        """Two encoders; ``token`` is a new file for the registration's."""
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        telling, decoding = free_ports(2)
        registers = _settings(
            CONSUMER,
            proxy_url=f"http://127.0.0.1:{telling}",
            http_url=f"http://127.0.0.1:{decoding}",
            proxy_token=str(token),
        )
        encoder = self._engines.start("encoder", self._first, PRODUCER)
        second = self._engines.start("second encoder", self._last, PRODUCER)
        decoder = self._engines.start("decoder", self._last, registers, port=decoding)
        options = ("--encode", second.url)
        plain = self._crew.router(encoder, decoder, *options)
        options = (*options, "--register-token", str(token))
        hints = self._crew.router(encoder, decoder, *options, port=telling)
        self._crew.wait(encoder, second, decoder, plain, hints)
        self._run(TWO, {ROUTER: direct(plain), HINTS: direct(hints)}, decoder)
        self._found.notes.append(f"{TWO}: hints {metrics(hints.url).get(_TOLD, 0):.0f}")
        self._crew.stop(encoder, second, decoder, plain, hints)

    def _run(self, where: str, ways: Mapping[str, Way], decoder: Server) -> None:
        before = metrics(decoder.url)
        self._found.rows += by_turns(where, ways, self._pictures, self._rounds, self._tell)
        after = metrics(decoder.url)
        fetched = growth(before, after, f"{_FETCH}_count")
        if fetched:
            self._found.fetch_ms[where] = _ms(growth(before, after, f"{_FETCH}_sum") / fetched)
        if encoded := encoded_pictures(decoder.url):
            self._found.notes.append(f"{where}: the decoder encoded {encoded} pictures itself")


def _settings(ec: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    return {**ec, "ec_connector_extra_config": extra}


def measure(model: Path, folder: Path, console: Console, rounds: int) -> Found:
    """All sets."""
    found = Found(facts(), [], {}, [])
    with Servers() as servers:
        engines = Engines(servers, console, model)
        sets = Sets(engines, Pictures(folder), rounds, found, console.print)
        sets.here()
        sets.far()
        sets.two(folder / "router_token")
    found.notes += [f"left behind: {what}" for what in servers.leftovers]
    found.facts["load_after"] = [round(load, 1) for load in os.getloadavg()]
    return found


def facts() -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "vllm": _vllm(),
        "vision_layers": VISION_LAYERS,
        "load_before": [round(load, 1) for load in os.getloadavg()],
    }


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return ""


def main() -> int:
    """Measure, print and write; the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="that count (12)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write it there too")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least one")
    console = Console(width=110, highlight=False)
    with tempfile.TemporaryDirectory(prefix="ec-first-token-") as name:
        model = make_qwen2_vl(Path(name) / "model", vision_layers=VISION_LAYERS)
        found = measure(model, Path(name), Console(stderr=True, highlight=False), options.rounds)
    if options.json:
        text = msgspec.json.format(msgspec.json.encode(found), indent=1)
        options.json.write_bytes(text + b"\n")
    console.print(table(found.rows))
    for where, ms in found.fetch_ms.items():
        console.print(f"{where}: a decoder's fetch of an item took {ms} ms in the mean")
    for line in (*(f"{name}: {value}" for name, value in found.facts.items()), *found.notes):
        console.print(line, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
