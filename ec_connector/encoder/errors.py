# SPDX-License-Identifier: Apache-2.0
"""Why a request is not encoded. A router then gives the media to the decoder."""

from __future__ import annotations

from ec_connector.errors import ECConnectorError


class RequestError(ECConnectorError):
    """The request cannot be served as it is; ``status`` is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
