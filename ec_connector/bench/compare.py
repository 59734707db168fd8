# SPDX-License-Identifier: Apache-2.0
"""The command ``ec-connector bench compare``."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich.console import Console

from ec_connector.bench.ours import BenchError
from ec_connector.bench.pulls import Pictures, Way, measure
from ec_connector.bench.weigh import Comparison
from ec_connector.bench.weighed import plot, show
from ec_connector.codecs.choice import KNOWN_CODECS, LZ4, NONE, ZSTD, lacking
from ec_connector.config import KNOWN_PLANES

GOOD, PROBLEM, USAGE = 0, 1, 2
LOSSLESS = (NONE, ZSTD, LZ4)
DRAWN = 4
_WIDTH = 130


def main(argv: Sequence[str]) -> int:
    """Measure, print and write what was asked for; the exit status.

    1 when the pair does not answer as one, or nothing could be compared.
    """
    options = _options(argv)
    if options.demo == bool(options.encode and options.decode):
        print("give --encode and --decode, or --demo", file=sys.stderr)
        return USAGE
    if not options.image and find_spec("PIL") is None:
        print("no pillow to draw pictures with; name some: --image FILE", file=sys.stderr)
        return USAGE
    console = Console(stderr=options.json == "-", markup=False, highlight=False)
    console.width = max(console.width, _WIDTH)
    progress = Console(stderr=True, markup=False, highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="ec-connector-") as name:
            comparison = _compare(options, Path(name), progress)
    except BenchError as error:
        print(error, file=sys.stderr)
        return PROBLEM
    command = " ".join(["ec-connector", "bench", "compare", *argv])
    comparison = msgspec.structs.replace(comparison, command=command)
    text = msgspec.json.format(msgspec.json.encode(comparison), indent=1)
    if options.json == "-":
        print(text.decode())
    elif options.json:
        Path(options.json).write_bytes(text + b"\n")
    if not comparison.trips:
        print("nothing was pulled, so nothing is compared", *comparison.notes, sep="\n",
              file=sys.stderr)  # fmt: skip
        return PROBLEM
    show(console, comparison)
    if options.plot:
        try:
            plot(comparison, options.plot)
        except ImportError as error:
            print(f"no plot: {error}: pip install 'ec-connector[bench]'", file=sys.stderr)
            return PROBLEM
        except ValueError as error:
            print(f"no plot: {error}", file=sys.stderr)
            return USAGE
    return GOOD


def _compare(options: Any, folder: Path, progress: Console) -> Comparison:
    ways, notes = ways_of(options.codec or LOSSLESS)
    files = list(options.image) or _drawn(folder)
    with contextlib.ExitStack() as stack:
        encode, decode = options.encode, options.decode
        if options.demo:
            encode, decode = stack.enter_context(_demo_pair(progress))
        status = stack.enter_context(progress.status("starting"))
        comparison = measure(
            encode.rstrip("/"),
            decode.rstrip("/"),
            Pictures(files, folder),
            ways,
            rounds=options.rounds,
            settings=options.config,
            tell=status.update,
        )
    return msgspec.structs.replace(comparison, notes=[*notes, *comparison.notes])


def ways_of(codecs: Sequence[str]) -> tuple[list[Way], list[str]]:
    """Every plane, and on those that pass a link every codec; notes on those not here."""
    missing = lacking(codecs)
    here = [codec for codec in codecs if codec not in missing]
    ways = [
        (plane, codec)
        for plane in KNOWN_PLANES
        for codec in ((NONE,) if plane == "memory" else here)
    ]
    return ways, [f"{name} is not measured: {remedy}" for name, remedy in missing.items()]


def _drawn(folder: Path) -> list[Path]:
    from ec_connector.demo.pictures import write_picture

    return [write_picture(folder, number, 640, 480, "jpeg") for number in range(DRAWN)]


@contextlib.contextmanager
def _demo_pair(progress: Console) -> Iterator[tuple[str, str]]:
    """A tiny producer and consumer, for as long as the context; their URLs. Raises BenchError."""
    missing = [name for name in ("vllm", "torch", "PIL") if find_spec(name) is None]
    if missing:
        raise BenchError(f"--demo needs {', '.join(missing)}: pip install 'ec-connector[vllm]'")
    from ec_connector.demo.crew import CONSUMER, PRODUCER, Crew
    from ec_connector.demo.models import make_llava
    from ec_connector.demo.servers import ServerError, Servers

    usable = [codec for codec in (ZSTD, LZ4, NONE) if codec not in lacking((ZSTD, LZ4))]
    encoder = {**PRODUCER, "ec_connector_extra_config": {"codecs": usable}}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    servers = Servers()
    try:
        model = make_llava(servers.folder / "tiny-llava")
        crew = Crew(servers, progress)
        producer = crew.vllm("encoder", model, encoder)
        consumer = crew.vllm("decoder", model, CONSUMER)
        crew.wait(producer, consumer)
        yield producer.url, consumer.url
    except ServerError as error:
        raise BenchError(str(error)) from error
    finally:
        servers.close()
    if servers.leftovers:
        raise BenchError(f"left behind: {'; '.join(servers.leftovers)}")


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _options(argv: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(
        prog="ec-connector bench compare",
        description="Compare, on a live pair, the time to first token with the encoding pulled "
        "and with the picture encoded again by the decoder, and say below which link pulling "
        "stops paying. Requests bring pictures that no cache has seen.",
    )
    parser.add_argument("--encode", metavar="URL", default="", help="an ec_producer")
    parser.add_argument("--decode", metavar="URL", default="", help="an ec_consumer")
    parser.add_argument("--demo", action="store_true", help="start a tiny pair for it")
    parser.add_argument("--image", metavar="FILE", type=_file, action="append", default=[],
        help="a JPEG or PNG to ask about (may be repeated); drawn ones otherwise")  # fmt: skip
    parser.add_argument("--rounds", metavar="N", type=_count, default=20,
        help="pictures that count, each way (20)")  # fmt: skip
    parser.add_argument("--codec", metavar="NAME", choices=KNOWN_CODECS, action="append",
        default=[], help="codecs to fetch with (may be repeated); the lossless ones otherwise; "
        "the encoder must have them in its codecs")  # fmt: skip
    parser.add_argument("--config", metavar="JSON", type=_settings, default={},
        help="settings of the fetches made here (allow_peers, curve_keys ...)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", default="", help="write it; -: print it")
    parser.add_argument("--plot", metavar="FILE", type=Path,
        help="draw time over the link's rate (PNG or SVG)")  # fmt: skip
    return parser.parse_args(argv)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return path


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 10000")
    return int(text)


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return settings
