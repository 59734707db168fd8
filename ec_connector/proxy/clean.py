# SPDX-License-Identifier: Apache-2.0
"""Takes transfer parameters out of answers: they hold addresses that are no client's business.

What holds none passes byte for byte.
"""

from __future__ import annotations

import json
import re

# A null is vLLM's way of saying that there are none. Text that a model wrote is inside a JSON
# string, where its quotes are escaped: it does not match.
_PARAMS = re.compile(rb'"(?:ec|kv)_transfer_params"\s*:\s*(?!null\b|\s)')
_NAMES = frozenset({"ec_transfer_params", "kv_transfer_params"})

MAX_EVENT = 16 * 1024 * 1024
"""Bytes of one line of an event stream."""


def clean_json(raw: bytes) -> bytes:
    """A JSON document without any transfer parameters.

    Raises:
        ValueError: it seems to hold some, but cannot be read.
    """
    if not _PARAMS.search(raw):
        return raw
    try:
        return json.dumps(_without(json.loads(raw))).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class EventCleaner:
    """The same for a stream of server-sent events, fed in pieces of any size."""

    def __init__(self) -> None:
        self._begun = bytearray()  # a line whose end has not come

    def feed(self, piece: bytes) -> bytes:
        """What may be passed on now: whole lines.

        Raises:
            ValueError: a line is too long, or seems to hold parameters but cannot be read.
        """
        end = piece.rfind(b"\n") + 1
        if not end:
            self._begun += piece
            if len(self._begun) > MAX_EVENT:
                raise ValueError(f"a line of its event stream exceeds {MAX_EVENT} bytes")
            return b""
        lines = bytes(self._begun) + piece[:end]
        self._begun = bytearray(piece[end:])
        if not _PARAMS.search(lines):
            return lines
        return b"".join(_clean_line(line) for line in lines.splitlines(keepends=True))

    def end(self) -> bytes:
        """What is left when the stream has ended. Raises as :meth:`feed`."""
        line, self._begun = bytes(self._begun), bytearray()
        return _clean_line(line)


def _clean_line(line: bytes) -> bytes:
    if not _PARAMS.search(line):
        return line
    field, colon, data = line.partition(b":")
    space = b" " if data.startswith(b" ") else b""
    return field + colon + space + clean_json(data.strip()) + line[len(line.rstrip()) :]


def _without(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without(inner) for name, inner in value.items() if name not in _NAMES}
    if isinstance(value, list):
        return [_without(inner) for inner in value]
    return value
