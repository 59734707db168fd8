# SPDX-License-Identifier: Apache-2.0
"""What the router is told on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where the servers are and how long the router waits for them.

    ``encode`` and ``decode`` are root URLs, used in turn. ``metadata_only`` sends the
    decoder an item's placeholder metadata in place of the media, where the model
    publishes any. ``port`` 0 takes a free one. Times in seconds: ``connect_timeout``
    per connection, ``encode_timeout`` for the whole encoding (after it the decoder
    gets the media), ``decode_timeout`` for the longest silence of a decoder.
    ``max_body`` in bytes: a larger request is answered 413.
    """

    encode: tuple[str, ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    metadata_only: bool = False
    connect_timeout: float = 2.0
    encode_timeout: float = 30.0
    decode_timeout: float = 600.0
    max_body: int = 64 * 1024 * 1024


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """The options in ``argv`` (None: this process's own).

    Raises:
        SystemExit: status 2 for a wrong option, 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog="ec-connector proxy",
        description="Route OpenAI chat requests: media to an encoder, then all to a decoder.",
    )
    add = parser.add_argument
    add("--encode", metavar="URL", nargs="+", action="extend", required=True, type=_root_url,
        help="encoding servers (ec_producer), for example http://127.0.0.1:8101")  # fmt: skip
    add("--decode", metavar="URL", nargs="+", action="extend", required=True, type=_root_url,
        help="decoding servers (ec_consumer)")  # fmt: skip
    add("--host", default=Options.host, help="address to listen on (%(default)s)")
    add("--port", type=_port, default=Options.port, help="port, 0 for a free one (%(default)s)")
    add("--metadata-only", action="store_true",
        help="send decoders placeholder metadata instead of media, where the model "
             "publishes it; their media options must equal the encoders'")  # fmt: skip
    add("--connect-timeout", metavar="S", type=_seconds, default=Options.connect_timeout,
        help="seconds to connect to a server (%(default)s)")  # fmt: skip
    add("--encode-timeout", metavar="S", type=_seconds, default=Options.encode_timeout,
        help="seconds for an encoding, else the decoder gets the media (%(default)s)")  # fmt: skip
    add("--decode-timeout", metavar="S", type=_seconds, default=Options.decode_timeout,
        help="seconds that a decoder may be silent (%(default)s)")  # fmt: skip
    add("--max-body-mib", metavar="N", type=_mebibytes, dest="max_body", default=Options.max_body,
        help="largest request in MiB (64)")  # fmt: skip
    values = vars(parser.parse_args(argv))
    return Options(
        **{**values, "encode": tuple(values["encode"]), "decode": tuple(values["decode"])}
    )


def _root_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://127.0.0.1:8101")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r}: give the server's root, without a path")
    return f"{parts.scheme}://{parts.netloc}"


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 0xFFFF:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _mebibytes(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of MiB from 1 to 4096")
    return int(text) * 1024 * 1024
