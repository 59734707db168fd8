# SPDX-License-Identifier: Apache-2.0
"""``python -m ec_connector.stage``: the worker.

It prints one line of JSON, ``{"address": "host:port"}``, once it can be reached or connects.
Exit status 0 good, 1 its caller is gone, 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
from pathlib import Path

from ec_connector.errors import ConfigError
from ec_connector.stage.errors import StageLostError
from ec_connector.stage.link import Link
from ec_connector.stage.messages import DEFAULT_PAYLOAD_BYTES
from ec_connector.stage.runtime import ONNX, find_runtime
from ec_connector.stage.worker import Worker
from ec_connector.units import parse_size

logger = logging.getLogger("vllm.ec_connector.stage")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = _parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(levelname)s %(asctime)s [stage] %(message)s",
    )
    token = _owned() if options.owned else ""
    try:
        graphs = _graphs(options.graph)
        runtime = find_runtime(options.runtime)
        link = Link(
            connect=options.connect,
            listen=options.listen,
            limit=options.payload_limit,
            curve_keys=options.curve_keys,
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    host = options.listen.rpartition(":")[0]
    if host and host not in ("127.0.0.1", "localhost", "[::1]") and options.curve_keys is None:
        logger.warning(
            "whoever reaches %s can run this worker's graphs: give --curve-keys, or listen on "
            "127.0.0.1", link.address,
        )  # fmt: skip
    print(json.dumps({"address": link.address}), flush=True)
    try:
        Worker(link, graphs, runtime, token).serve()
    except StageLostError as error:
        logger.error("the caller at %s is gone: %s", link.address, error)
        return 1
    except KeyboardInterrupt:
        pass
    finally:
        link.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ec_connector.stage", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--listen", default="", metavar="HOST:PORT", help="wait for callers here")
    where.add_argument("--connect", default="", metavar="HOST:PORT", help="connect to a caller")
    parser.add_argument(
        "--graph", action="append", default=[], metavar="NAME=FILE",
        help="a graph that callers may load; may be given several times",
    )  # fmt: skip
    parser.add_argument("--runtime", default=ONNX, metavar="MODULE:CLASS", help="what runs graphs")
    parser.add_argument("--curve-keys", type=Path, metavar="DIR", help="encrypt (keygen made it)")
    parser.add_argument("--payload-limit", type=_size, default=DEFAULT_PAYLOAD_BYTES,
                        metavar="SIZE", help="most bytes in one message")  # fmt: skip
    parser.add_argument("--owned", action="store_true", help=argparse.SUPPRESS)
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from error


def _graphs(given: list[str]) -> dict[str, Path]:
    graphs = {}
    for text in given:
        name, _, file = text.partition("=")
        if not name or not file:
            raise ConfigError(f"--graph {text!r}: write NAME=FILE")
        if not Path(file).exists():
            raise ConfigError(f"--graph {text!r}: there is no {file}")
        graphs[name] = Path(file)
    return graphs


def _owned() -> str:
    """The owner's token, the first line of standard input; its end is the owner's."""
    token = sys.stdin.readline().strip()

    def end_with_owner() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_owner, daemon=True, name="owner").start()
    return token


if __name__ == "__main__":
    raise SystemExit(main())
