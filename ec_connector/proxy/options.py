# SPDX-License-Identifier: Apache-2.0
"""What the router is told on its command line and in its file of options."""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ec_connector.units import format_size, parse_duration, parse_size


class Address(NamedTuple):
    """A server's root URL, and how many data-parallel ranks it has that are addressed."""

    url: str
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where the servers are and how long the router waits for them.

    ``encode``, ``decode`` and ``prefill`` are servers, without ``prefill`` the decoders do
    that too. ``metadata_only`` sends the decoder an item's placeholder metadata in place of
    the media, where the model publishes any. ``port`` 0 takes a free one. Times in seconds:
    ``connect_timeout`` per connection, ``encode_timeout`` for one encoder's answer,
    ``prefill_timeout`` for a prefill server's, ``decode_timeout`` for the longest silence of
    a decoder, ``total_timeout`` for a request as a whole, ``probe_interval`` between two
    health checks of a server. ``max_body`` in bytes: a larger request is answered 413, and
    one that takes longer than ``body_timeout`` to arrive 408. While ``max_requests`` requests or
    ``max_bytes`` bytes of their bodies are under way, further ones are answered 503.
    ``register_token``: file of the token with which servers may register themselves; ``encode``
    and ``decode`` may then be empty. ``tenant_header``: the request's header that names its tenant.
    ``otlp_traces_endpoint``: collector that OpenTelemetry spans go to.
    """

    encode: tuple[Address, ...] = ()
    decode: tuple[Address, ...] = ()
    prefill: tuple[Address, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    metadata_only: bool = True
    connect_timeout: float = 2.0
    encode_timeout: float = 30.0
    prefill_timeout: float = 120.0
    decode_timeout: float = 600.0
    total_timeout: float = 3600.0
    probe_interval: float = 5.0
    body_timeout: float = 60.0
    max_body: int = 64 * 1024 * 1024
    max_bytes: int = 1024 * 1024 * 1024
    max_requests: int = 4096
    register_token: str = ""
    tenant_header: str = ""
    otlp_traces_endpoint: str = ""


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """The options in ``argv`` (None: this process's own) and in the file it names.

    What the command line says stands above the file.

    Raises:
        SystemExit: status 2 for a wrong option, 0 after ``--help``.
    """
    parser = _parser()
    given = vars(parser.parse_args(argv))
    path = given.pop("config", None)
    if path is not None:
        given = {**_from_file(parser, path), **given}
    for name in ("encode", "decode"):
        if not given.get(name) and not given.get("register_token"):
            parser.error(
                f"--{name} is missing: give one URL or more, or --register-token FILE and have "
                "servers register themselves"
            )
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    options = Options(**values)
    if options.max_body > options.max_bytes:
        parser.error(
            f"--max-body {format_size(options.max_body)} exceeds --max-bytes "
            f"{format_size(options.max_bytes)}: no request of that size could ever be taken"
        )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ec-connector proxy",
        description="Route OpenAI requests: media to an encoder, then all to a decoder.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="TOML or JSON file with these options, by name")
    for name, servers in {
        "encode": "encoding servers (ec_producer), for example http://127.0.0.1:8101; one with "
        "4 data-parallel ranks to be addressed is http://127.0.0.1:8101#ranks=4",
        "decode": "decoding servers (ec_consumer)",
        "prefill": "servers that prefill for the decoders (ec_consumer, with a KV connector)",
    }.items():
        add(f"--{name}", metavar="URL", nargs="+", action="extend", type=_address, help=servers)
    add("--host", type=_host, help=f"address to listen on ({Options.host})")
    add("--port", type=_port, help=f"port, 0 for a free one ({Options.port})")
    add("--metadata-only", action=argparse.BooleanOptionalAction,
        help="send decoders placeholder metadata instead of media, where the model "
             "publishes it (default)")  # fmt: skip
    for name, meaning in {
        "connect_timeout": "to connect to a server",
        "encode_timeout": "for an encoder's answer, else another or the decoder has to encode",
        "prefill_timeout": "for a prefill server's answer",
        "decode_timeout": "that a decoder may be silent",
        "total_timeout": "for a request as a whole",
        "body_timeout": "for a request's body to arrive",
        "probe_interval": "between health checks of a server",
    }.items():
        add(_flag(name), metavar="TIME", type=_duration,
            help=f'time {meaning}: seconds or "500ms", "30s", "5m" '
                 f"({getattr(Options, name):g}s)")  # fmt: skip
    add("--max-body", metavar="SIZE", type=_size,
        help=f"largest request ({format_size(Options.max_body)})")  # fmt: skip
    add("--max-bytes", metavar="SIZE", type=_size,
        help=f"most bytes of requests under way ({format_size(Options.max_bytes)})")  # fmt: skip
    add("--max-requests", metavar="N", type=_count,
        help=f"most requests under way ({Options.max_requests})")  # fmt: skip
    add(
        "--register-token",
        metavar="FILE",
        help="let servers register themselves (proxy_url) that know this file's token",
    )
    add("--tenant-header", metavar="NAME",
        help="header that names a request's tenant, set by whoever lets clients in; no tenant "
             "can then use the identifiers (uuid) of another")  # fmt: skip
    add("--otlp-traces-endpoint", metavar="URL",
        help="send OpenTelemetry spans to this collector, as vLLM's option of the same "
             "name does")  # fmt: skip
    return parser


def _from_file(parser: argparse.ArgumentParser, path: str) -> dict[str, Any]:
    """A file's options, checked just as those of the command line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        parser.error(f"--config {path}: {error}")
    if not isinstance(values, Mapping):
        parser.error(f"--config {path}: not an object of options")
    known = [field.name for field in fields(Options)]
    argv: list[str] = []
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"
            parser.error(f"--config {path}: unknown option {key!r}: {hint}")
        if isinstance(value, bool):
            argv.append(_flag(name) if value else _flag(name).replace("--", "--no-", 1))
            continue
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, (str, int, float)):
                parser.error(f"--config {path}: {key}={one!r} is neither text nor a number")
            argv.append(f"{_flag(name)}={one}")
    return vars(parser.parse_args(argv))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def root_url(text: str) -> str:
    """A server's root as the router writes it. Raises ValueError."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not a URL such as http://127.0.0.1:8101")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL with a user or password would stand in logs: leave them out")
    try:
        spelled = parts.port != 0 and not any(c.isspace() for c in parts.netloc)
    except ValueError:  # no number, or beyond 65535
        spelled = False
    if not spelled:
        raise ValueError(f"{text!r} has no host and port such as 127.0.0.1:8101")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"{text!r}: give the server's root, without a path")
    return f"{parts.scheme}://{parts.netloc}"


def _address(text: str) -> Address:
    url, hash_, fragment = text.partition("#")
    try:
        root = root_url(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    name, _, ranks = fragment.partition("=")
    if hash_ and (name != "ranks" or not ranks.isdecimal() or not 1 <= int(ranks) <= 4096):
        raise argparse.ArgumentTypeError(f"{text!r}: after # comes ranks=N, as in #ranks=4")
    return Address(root, int(ranks or 1))


def _host(text: str) -> str:
    if not text:  # an unset variable; aiohttp would listen on every address
        raise argparse.ArgumentTypeError("it is empty; 0.0.0.0 stands for every address")
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 0xFFFF:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from error
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0")
    return seconds


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from error
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0")
    return size
