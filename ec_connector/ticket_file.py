# SPDX-License-Identifier: Apache-2.0
"""The file of ``ticket_key``, shared by all producers and consumers of a fleet."""

from __future__ import annotations

from pathlib import Path

from ec_connector.errors import ConfigError
from ec_connector.key_file import check_key_file
from ec_connector.protocol.tickets import Tickets

_MAX_BYTES = 4096


def load_tickets(name: str) -> Tickets | None:
    """The keys in this file; None without a name.

    Raises:
        ConfigError: the file is unreadable, no regular file, readable by everybody, or holds
            no key.
    """
    if not name:
        return None
    path = Path(name)
    check_key_file(path, f"ticket_key={name!r}", secret=True)
    try:
        with path.open(encoding="ascii") as file:
            text = file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"ticket_key={name!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        text = ""
    try:
        return Tickets.parse(text)
    except ConfigError as error:
        raise ConfigError(f"ticket_key={name!r}: {error}") from None
