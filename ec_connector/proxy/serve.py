# SPDX-License-Identifier: Apache-2.0
"""Runs the router's application in a server of its own."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Iterable

import uvicorn

from ec_connector.errors import ConfigError
from ec_connector.proxy.ahead import Streams
from ec_connector.proxy.app import build_app
from ec_connector.proxy.options import Address, Options

logger = logging.getLogger("vllm.ec_connector.proxy")


def serve(options: Options) -> int:
    """Serve until SIGINT or SIGTERM. Returns 0, or 1 when it cannot; the log says why."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s %(message)s")
    try:
        prepared = server(options)
    except ConfigError as error:
        logger.error("%s", error)
        return 1
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        logger.error("cannot listen on %s port %d: %s", options.host, options.port, error)
        return 1
    with listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        logger.info(
            "router on http://%s:%d, encode %s, decode %s",
            shown, port, _urls(options.encode) or "-", _urls(options.decode) or "-",
        )  # fmt: skip
        # uvicorn raises the signal again after an orderly end: 0 then, not "killed".
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            prepared.run(sockets=[listener])
    return 0


def _urls(addresses: Iterable[Address]) -> str:
    return " ".join(address.url for address in addresses)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def server(options: Options) -> uvicorn.Server:
    """The server around the application, not yet running. Raises ConfigError."""
    app = build_app(options)
    return _Server(
        app.state.streams,
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            log_level="warning",
            # Answers carry the decoder's own.
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=5,
            # Longer than load balancers keep an idle connection: whoever closes first must not
            # be the one that a request is on its way to.
            timeout_keep_alive=75,
        ),
    )


class _Server(uvicorn.Server):
    """Ends what would not end by itself, so that its own end does not wait for it."""

    def __init__(self, streams: Streams, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._streams = streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._streams.end()
        await super().shutdown(sockets)
