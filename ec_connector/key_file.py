# SPDX-License-Identifier: Apache-2.0
"""What every file of keys must be, looked at before it is opened."""

from __future__ import annotations

import stat
from pathlib import Path

from ec_connector.errors import ConfigError

_MAX_BYTES = 64 * 1024


def check_key_file(path: Path, name: str, *, secret: bool) -> None:
    """Refuse what must not be read as keys. ``name`` is how messages call the file.

    A pipe would hold up the start for ever, a device has no end, and to advise
    ``chmod 600`` on either would harm the host.

    Raises:
        ConfigError: it is not there, no regular file or too large; ``secret`` and
            readable by everybody.
    """
    try:
        facts = path.stat()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL in it
        raise ConfigError(f"{name} is no file name") from None
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(f"{name} is no regular file; give one made by ec-connector keygen")
    if facts.st_size > _MAX_BYTES:
        raise ConfigError(
            f"{name} has {facts.st_size} bytes, more than any key file; "
            "give one made by ec-connector keygen"
        )
    if secret and facts.st_mode & 0o007:
        raise ConfigError(f"{name} can be read by every user of this host: chmod 600 {path}")
