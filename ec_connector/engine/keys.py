# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's item identifiers may leave the engine."""

from __future__ import annotations

import re
from typing import Final

from ec_connector.protocol.messages import MAX_HASH_CHARS

# With its processor cache and prefix caching both off vLLM does not hash content: it numbers
# the items of each process, and the same number means another picture in the next engine.
_REQUEST_LOCAL: Final = re.compile(r"(?:.*:)?renderer\d+-mm-\d+-.+-\d+", re.DOTALL)


def why_not_shared(key: str) -> str:
    """Why this identifier must not be used between engines; empty when it may.

    The answer is a counted label: ``"request_local"`` or ``"bad_key"``.
    """
    if _REQUEST_LOCAL.fullmatch(key):
        return "request_local"
    if not key or len(key) > MAX_HASH_CHARS:
        return "bad_key"
    return ""
