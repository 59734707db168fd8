# SPDX-License-Identifier: Apache-2.0
"""Text from a peer, for logs and exceptions: as it came, but for what commands a terminal."""

from __future__ import annotations


def harmless(text: str, keep: str = "") -> str:
    """The text with ``\\ufffd`` for each character that does not print; those of ``keep`` stay."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else "\ufffd" for one in text)
