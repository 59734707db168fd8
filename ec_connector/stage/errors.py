# SPDX-License-Identifier: Apache-2.0
"""What a stage raises. ``code`` is short and meant for programs, the text for people."""

from __future__ import annotations

from ec_connector.errors import ECConnectorError

MAX_TRACEBACK_CHARS = 16_384


class StageError(ECConnectorError):
    """A call to a worker failed; the text holds message, code and the worker's traceback."""

    def __init__(self, code: str, message: str, traceback: str = "") -> None:
        self.code = code
        self.message = message
        self.traceback = traceback
        text = f"{message} (code {code})"
        if traceback:
            text += f"\n--- the worker's traceback ---\n{traceback.rstrip()}"
        super().__init__(text)


class StageLostError(StageError):
    """The worker ended or the connection to it broke: this stage is of no more use."""

    def __init__(self, message: str) -> None:
        super().__init__("lost", message)


class StageDeadlineError(StageError):
    """The worker did not answer in time: this stage is of no more use."""

    def __init__(self, message: str) -> None:
        super().__init__("deadline", message)
