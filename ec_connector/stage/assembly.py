# SPDX-License-Identifier: Apache-2.0
"""Frames of one connection put together to messages: no socket, no clock."""

from __future__ import annotations

from typing import Any

import numpy as np

from ec_connector.stage.errors import StageError
from ec_connector.stage.messages import Message, check_size, decode, payload_bytes, unpack

Arrays = dict[str, np.ndarray[Any, Any]]


class Refused(StageError):
    """A message that is not taken; ``id`` is that of the call it was, 0 when not known."""

    def __init__(self, error: StageError, call_id: int) -> None:
        super().__init__(error.code, error.message)
        self.id = call_id


class Assembly:
    """What has come of one connection's current message.

    Args:
        limit: most bytes of tensors in one message.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._message: Message | None = None
        self._raw = np.empty(0, np.uint8)
        self._filled = 0
        self._to_drop = 0

    @property
    def pending_bytes(self) -> int:
        """Memory taken for a message that is not complete."""
        return self._raw.nbytes if self._message is not None else 0

    def take(self, frame: memoryview, *, elsewhere: int = 0) -> tuple[Message, Arrays] | None:
        """The message that this frame completes, if it does.

        ``elsewhere`` is the memory that unfinished messages of other connections have.

        Raises:
            Refused: this frame begins or ends something that cannot be taken. What still
                belongs to it is dropped as it comes.
        """
        if self._to_drop:
            self._to_drop = max(0, self._to_drop - len(frame))
            return None
        if self._message is None:
            try:
                message = decode(frame)
            except StageError as error:
                raise Refused(error, 0) from error
            total = payload_bytes(message)
            try:
                check_size(total + elsewhere, self._limit)
                self._raw = np.empty(total, np.uint8)
            except StageError as error:
                self._to_drop = total
                raise Refused(error, message.id) from error
            except MemoryError as error:
                self._to_drop = total
                text = f"no memory for {total} bytes of tensors"
                raise Refused(StageError("too_large", text), message.id) from error
            self._message, self._filled = message, 0
        else:
            room = self._raw[self._filled :]
            if not 0 < len(frame) <= len(room):
                self._message = None
                text = f"a frame of {len(frame)} bytes where at most {len(room)} were due"
                raise Refused(StageError("bad_message", text), 0)
            room[: len(frame)] = frame
            self._filled += len(frame)
        if self._filled < self._raw.nbytes:
            return None
        message, self._message = self._message, None
        raw, self._raw = self._raw, np.empty(0, np.uint8)
        try:
            return message, unpack(message, raw)
        except StageError as error:
            raise Refused(error, message.id) from error
