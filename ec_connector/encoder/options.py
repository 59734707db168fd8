# SPDX-License-Identifier: Apache-2.0
"""The command line of ``ec-connector encode-server``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ec_connector.config import Settings
from ec_connector.encoder.rows import DTYPES
from ec_connector.errors import ConfigError
from ec_connector.stage.messages import DEFAULT_PAYLOAD_BYTES
from ec_connector.stage.runtime import ONNX
from ec_connector.units import parse_duration, parse_size


@dataclass(frozen=True, kw_only=True)
class Options:
    """``graph``: a file for a worker of our own, else its name at the worker that is connected
    to or listened for. ``dtype`` empty: the checkpoint's. Times in seconds, sizes in bytes."""

    graph: str
    processor: Path
    model: str
    dtype: str
    hasher: str
    settings: Mapping[str, Any]
    host: str
    port: int
    stage_connect: str
    stage_listen: str
    stage_python: str
    stage_runtime: str
    stage_keys: Path | None
    stage_timeout: float
    payload_limit: int
    max_body: int

    @property
    def own_worker(self) -> bool:
        """Whether the worker is a child of this process."""
        return not (self.stage_connect or self.stage_listen)


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """The options; wrong ones end the process with status 2."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    given["model"] = given["model"] or str(given["processor"])
    try:
        text = given["settings"]
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        Settings.from_json(text)
        given["settings"] = json.loads(text)
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        parser.error(f"--config: {error}")
    options = Options(**given)
    if options.own_worker and not Path(options.graph).is_file():
        parser.error(f"--graph {options.graph!r} is no file")
    if not options.processor.is_dir():
        parser.error(f"--processor {str(options.processor)!r} is no folder")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ec-connector encode-server",
        description="Encode the images of chat requests with a graph, for vLLM consumers.",
    )
    add = parser.add_argument
    add("--graph", required=True, help="an ONNX file; with a worker elsewhere its name for it")
    add("--processor", required=True, type=Path, metavar="DIR",
        help="the checkpoint's folder: its processor, its config.json")  # fmt: skip
    add("--model", default="", help="as consumers name the model (default: DIR)")
    add("--dtype", default="", choices=["", *DTYPES], help="of consumers (default: config.json's)")
    add("--mm-hasher-algorithm", dest="hasher", default="blake3", help="as of consumers")
    add("--config", dest="settings", default="{}", metavar="FILE|JSON",
        help="settings of the agent: pool_size, bind_host, port, curve_keys ...")  # fmt: skip
    add("--host", default="127.0.0.1", help="address of the HTTP server (127.0.0.1)")
    add("--port", type=int, default=8000, help="its port (8000); 0 takes a free one")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--stage-connect", default="", metavar="HOST:PORT", help="a worker's")
    where.add_argument("--stage-listen", default="", metavar="HOST:PORT", help="a worker connects")
    add("--stage-python", default="", metavar="FILE", help="interpreter of a worker of our own")
    add("--stage-runtime", default=ONNX, metavar="MODULE:CLASS", help="what runs the graph")
    add("--stage-keys", type=Path, metavar="DIR", help="encrypt the way to a worker elsewhere")
    add("--stage-timeout", type=_duration, default=30.0, help='for one picture ("30s")')
    add("--payload-limit", type=_size, default=DEFAULT_PAYLOAD_BYTES, help="of one message")
    add("--max-body", type=_size, default=64 << 20, help='largest request ("64MiB")')
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from error


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from error
