# SPDX-License-Identifier: Apache-2.0
"""The file of the token with which engines register at a router, shared by both."""

from __future__ import annotations

from pathlib import Path

from ec_connector.errors import ConfigError

_MAX_BYTES = 4096
_LEAST_CHARS = 16


def load_token(setting: str, name: str) -> str:
    """The token in the file ``name``, which ``setting`` names.

    Raises:
        ConfigError: the file is unreadable, readable by everybody, or holds no single line.
    """
    path = Path(name)
    try:
        if path.stat().st_mode & 0o007:
            raise ConfigError(f"{setting}={name!r} can be read by every user: chmod 600 {name}")
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
