# SPDX-License-Identifier: Apache-2.0
"""The beginning of a stream of server-sent events: an answer, or an error?

vLLM says 200 before it knows; what goes wrong then is the stream's first event.
"""

from __future__ import annotations

import json

# Sent before the engine has done anything.
_SAY_NOTHING = frozenset({"response.created", "response.in_progress", "ping"})
_MAX_HELD = 1024 * 1024


class FirstEvent:
    """Looks for the first event that says something; fed with whole lines.

    Attributes:
        known: it has come.
        error: its status where it is an error, else 0.
        held: all lines so far.
    """

    def __init__(self) -> None:
        self.known = False
        self.error = 0
        self.held = b""

    def feed(self, lines: bytes) -> None:
        """The next lines of the stream."""
        self.held += lines
        for line in lines.splitlines():
            if not line.startswith(b"data:"):
                continue
            try:
                event = json.loads(line[5:])
            except (ValueError, RecursionError):
                event = None
            if isinstance(event, dict) and event.get("type") in _SAY_NOTHING:
                continue
            self.known = True
            self.error = _status(event)
            return
        self.known = len(self.held) > _MAX_HELD


def _status(event: object) -> int:
    if not isinstance(event, dict):
        return 0
    error = event.get("error")
    if not error and event.get("type") not in ("error", "response.failed"):
        return 0
    code = error.get("code") if isinstance(error, dict) else event.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500
