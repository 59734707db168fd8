# SPDX-License-Identifier: Apache-2.0
"""A producer's word, to processes of its host, that it shows these blocks of its memory.

An answer for the memory plane says where bytes lie, and whoever gets it could copy that to
others: a peer that knows one item could then name all other blocks, and have a consumer that may
map the region read them for it. So an answer holds an HMAC under a secret that stands in the
region itself. Who cannot map the region cannot make one, and who can needs none.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence

SECRET_BYTES = 32
PROOF_BYTES = 16


def proof_of(
    secret: bytes, generation: int, nbytes: int, extents: Sequence[tuple[int, int]]
) -> bytes:
    """For the item of this generation and size that lies in these extents (numbers of 63 bits)."""
    numbers = [generation, nbytes, *(number for extent in extents for number in extent)]
    return hmac.digest(secret, struct.pack(f"<{len(numbers)}Q", *numbers), "sha256")[:PROOF_BYTES]
