# SPDX-License-Identifier: Apache-2.0
"""What the loop waits for: sockets and descriptors, each with what to do when it can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

Source = zmq.Socket[bytes] | int
Handler = Callable[[], None]


class Reactor:
    """Readable things and their handlers. The cost of a turn grows with what is ready."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Handler] = {}

    def add(self, source: Source, handler: Handler) -> None:
        """Call ``handler`` in each turn in which ``source`` can be read."""
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def remove(self, source: Source) -> None:
        """Forget a source, also for the rest of a turn that is going on."""
        del self._handlers[source]
        self._poller.unregister(source)

    def turn(self, timeout_ms: int | None) -> None:
        """Wait until something can be read (None: for ever), and handle all that can."""
        for source, _ in self._poller.poll(timeout_ms):
            # An earlier handler of this turn may have closed it.
            handler = self._handlers.get(source)
            if handler is not None:
                handler()
