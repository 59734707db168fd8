# SPDX-License-Identifier: Apache-2.0
"""What the loop waits for: sockets and descriptors, each with what to do when it is ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

Source = zmq.Socket[bytes] | int
Handler = Callable[[], None]


class Reactor:
    """Ready things and their handlers. The cost of a turn grows with what is ready."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Handler] = {}

    def add(self, source: Source, handler: Handler) -> None:
        """Call ``handler`` in each turn in which ``source`` can be read."""
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def watch_writing(self, source: Source, wanted: bool) -> None:
        """Whether to call the handler too when ``source`` can be written."""
        self._poller.modify(source, zmq.POLLIN | zmq.POLLOUT if wanted else zmq.POLLIN)

    def remove(self, source: Source) -> None:
        """Forget a source, also for the rest of a turn that is going on."""
        del self._handlers[source]
        self._poller.unregister(source)

    def turn(self, timeout_ms: int | None) -> None:
        """Wait until something is ready (None: for ever), and handle all that is."""
        for source, _ in self._poller.poll(timeout_ms):
            # An earlier handler of this turn may have removed it.
            handler = self._handlers.get(source)
            if handler is not None:
                handler()
