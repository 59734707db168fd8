# SPDX-License-Identifier: Apache-2.0
"""The file of the token with which engines register at a router, shared by both."""

from __future__ import annotations

from pathlib import Path

from ec_connector.errors import ConfigError
from ec_connector.key_file import check_key_file

_MAX_BYTES = 4096
_LEAST_CHARS = 16


def load_token(setting: str, name: str) -> str:
    """The token in the file ``name``, which ``setting`` names.

    Raises:
        ConfigError: the file is unreadable, no regular file, readable by everybody, or holds
            no single line.
    """
    path = Path(name)
    check_key_file(path, f"{setting}={name!r}", secret=True)
    try:
        with path.open(encoding="ascii") as file:
            token = file.read(_MAX_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"{setting}={name!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        token = ""
    if len(token) < _LEAST_CHARS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{setting}={name!r} holds no token: write one line of {_LEAST_CHARS} or more letters "
            "and digits, for example by: openssl rand -hex 32"
        )
    return token
