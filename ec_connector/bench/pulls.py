# SPDX-License-Identifier: Apache-2.0
"""Measures a live pair: requests to the encoder and the decoder, and fetches of our own.

Each request brings a picture that no cache has seen: the same file with some bytes behind its
end, which no decoder of pictures reads and every hash does. What the encoder announces is also
fetched here, by each way in turn, with agents that know nothing of the decoder's settings.
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ec_connector import Consumer
from ec_connector.bench.ours import BenchError
from ec_connector.bench.weigh import Comparison, Move, Trip
from ec_connector.demo.chat import Answer, Body, ask, chat_body
from ec_connector.demo.readings import growth, metrics, settled_metrics
from ec_connector.errors import ECConnectorError
from ec_connector.proxy.rewrite import count_announced, decode_body, encode_body

Way = tuple[str, str]
"""Plane and codec."""

PROMPT: Final = "What is in the picture?"
FETCH_TIMEOUT: Final = 30.0
_FETCHED: Final = "vllm:ec_pool_fetched_items_total"
_HITS: Final = "vllm:ec_pool_hit_items_total"
_FETCH_SECONDS: Final = "vllm:ec_pool_fetch_time_seconds_sum"


class Prober:
    """Fetches announced items by one way, and remembers what each took."""

    def __init__(self, way: Way, settings: Mapping[str, Any]) -> None:
        self.plane, self.codec = way
        self.refused = ""
        self._seconds: list[float] = []
        self._nbytes = 0
        options = {"pool_size": "256MiB", **settings, "planes": [self.plane]}
        self._consumer = Consumer(**options, codecs=[self.codec])
        self._before = self._consumer.stats()

    def fetch(self, announced: Body) -> None:
        """Fetch all items of a request. A way that cannot be had is not tried again."""
        if self.refused:
            return
        try:
            begin = time.perf_counter()
            for key, entry in announced.items():
                self._consumer.fetch(key, entry, timeout=FETCH_TIMEOUT)
            self._seconds.append(time.perf_counter() - begin)
        except ECConnectorError as error:
            self.refused = f"{type(error).__name__}: {error}"
            return
        self._nbytes += sum(entry["size_bytes"] for entry in announced.values())
        if self.plane == "memory" and not self._grown("ready_memory"):
            self.refused = "the encoder's memory cannot be mapped from here"

    def forget(self) -> None:
        """What was fetched so far, the first of all, does not count."""
        self._seconds.clear()
        self._nbytes = 0
        self._before = self._consumer.stats()

    def close(self) -> None:
        """End the agent."""
        self._consumer.close()

    def move(self) -> Move:
        """All fetches since :meth:`forget`."""
        if self.refused or not self._seconds:
            refused = self.refused or "nothing was announced to fetch"
            return Move(self.plane, self.codec, refused=refused)
        packed, unpacked = self._grown("packed_bytes_received"), self._grown("unpacked_bytes")
        link = 0 if self.plane == "memory" else self._nbytes - unpacked + packed
        count = len(self._seconds)
        return Move(self.plane, self.codec, self._seconds, self._nbytes / count, link / count)

    def _grown(self, name: str) -> int:
        return int(self._consumer.stats().get(name, 0)) - int(self._before.get(name, 0))


def unseen(file: Path, to: Path) -> Path:
    """The same picture as a file that no cache knows: bytes behind its end, which no decoder of
    pictures reads and every hash does."""
    to.write_bytes(file.read_bytes() + b"\0" + secrets.token_bytes(16))
    return to


class Pictures:
    """Requests about pictures that nobody has seen, made of a few files in turn."""

    def __init__(self, files: Sequence[Path], folder: Path) -> None:
        self._files = files
        self._folder = folder
        self._made = 0

    def request(self) -> Body:
        """A streamed chat request for one token."""
        file = self._files[self._made % len(self._files)]
        self._made += 1
        path = unseen(file, self._folder / f"{self._made}{file.suffix}")
        body = chat_body([path], PROMPT, max_tokens=1)
        path.unlink()
        return body


def measure(
    encode: str,
    decode: str,
    pictures: Pictures,
    ways: Sequence[Way],
    *,
    rounds: int,
    settings: Mapping[str, Any],
    tell: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Compare on a live pair, by turns.

    Args:
        encode, decode: base URLs of an ``ec_producer`` and an ``ec_consumer``.
        ways: how to fetch here.
        rounds: requests of each kind that count; one more comes first.
        settings: keys for this side's agents (``allow_peers``, ``curve_keys`` ...).

    Raises:
        BenchError: the pair does not answer as one, or an agent cannot be started.
    """
    notes: list[str] = []
    trips: list[Trip] = []
    with contextlib.ExitStack() as stack:
        probers = []
        for way in ways:
            try:
                prober = Prober(way, settings)
            except ECConnectorError as error:
                raise BenchError(f"no agent for {', '.join(way)}: {error}") from error
            stack.callback(prober.close)
            probers.append(prober)
        for number in range(rounds + 1):
            tell(f"picture {number} of {rounds}")
            trip = _round(encode, decode, pictures, probers, pull_first=number % 2 == 0)
            if number == 0:
                for prober in probers:
                    prober.forget()
            elif isinstance(trip, Trip):
                trips.append(trip)
            else:
                notes.append(f"picture {number} does not count: {trip}")
        moves = [prober.move() for prober in probers]
    notes += [f"{move.name}: {move.refused}" for move in moves if move.refused]
    return Comparison(trips, moves, notes=notes)


def _round(
    encode: str, decode: str, pictures: Pictures, probers: Sequence[Prober], *, pull_first: bool
) -> Trip | str:
    """One picture pulled, another encoded by the decoder; in words why it is not a trip."""
    local = 0.0 if pull_first else _answer(decode, pictures.request()).first_token
    body = pictures.request()
    answer = _answer(encode, encode_body(body))
    if not count_announced(answer.announced):
        raise BenchError(
            f"{encode} announces nothing for a picture; is it an ec_producer, and does its pool "
            f"hold the item? It answered with {sorted(answer.announced)}"
        )
    for prober in probers:
        prober.fetch(answer.announced)
    before = _counted(decode)
    pulled = _answer(decode, decode_body(body, answer.announced)).first_token
    after = _counted(decode, above=before.get(_FETCHED, 0.0))
    if pull_first:
        local = _answer(decode, pictures.request()).first_token
    fetched = growth(before, after, _FETCHED) - growth(before, after, _HITS)
    if fetched < 1:
        return f"{decode} did not pull it; its log and vllm:ec_pool_fallback_items_total say why"
    return Trip(answer.whole, pulled, growth(before, after, _FETCH_SECONDS), local)


def _counted(url: str, above: float | None = None) -> dict[str, float]:
    """A server's metrics; with ``above`` once it has fetched more items than that."""
    try:
        if above is None:
            return metrics(url)
        return settled_metrics(url, wanted=_FETCHED, above=above)
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(f"{url}/metrics cannot be read: {error}") from error


def _answer(url: str, body: Body) -> Answer:
    try:
        answer = ask(url, body)
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(f"{url} does not answer: {error}") from error
    if answer.status != http.client.OK:
        raise BenchError(f"{url} answers with status {answer.status}: {answer.error[:300]}")
    return answer
