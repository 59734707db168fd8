# SPDX-License-Identifier: Apache-2.0
"""CURVE key files: made once for a fleet, read by agents, re-read when the list changes.

::

    DIR/server.key_secret   agents that serve (producers)
    DIR/server.key          agents that fetch (consumers): whom they mean to talk to
    DIR/client.key_secret   agents that fetch
    DIR/ticket_key          everybody, for the setting of that name
    DIR/client.key          allowed by agents that serve, unless curve_allow names others

The format is ZeroMQ's own certificate file. Each agent takes what it finds of these. One
without ``server.key_secret`` serves nobody, one without the other two dials nobody.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.certs import load_certificate
from zmq.utils import z85

from ec_connector.errors import ConfigError
from ec_connector.key_file import check_key_file

SERVER, CLIENT, TICKET = "server", "client", "ticket_key"
_KEY_CHARS = 40
_MAX_FILES = 65536


@dataclass(frozen=True, slots=True)
class Pair:
    """One key pair, in ZeroMQ's printable form (40 characters each)."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one agent can prove and whom it can tell.

    ``server`` None: it has no right to serve. ``client`` or ``server_public`` None:
    it cannot dial.
    """

    server: Pair | None
    client: Pair | None
    server_public: bytes | None


def make_keys(directory: Path) -> list[Path]:
    """Make both key pairs and a ticket key, files 0600 in ``directory``.

    A directory made for them is 0700; one that was there keeps its mode. Returns the files.

    Raises:
        ConfigError: one of the files is there already, every user may write to the
            directory (nothing is changed), or this one may not.
    """
    require_curve()
    names = [f"{who}.{kind}" for who in (SERVER, CLIENT) for kind in ("key", "key_secret")]
    names.append(TICKET)
    there = [name for name in names if os.path.lexists(directory / name)]
    if there:
        raise ConfigError(
            f"{directory} holds {', '.join(there)} already, and keys in use are not "
            "overwritten; give another directory"
        )
    files: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"every user of this host may write to {directory}, so keys there could be "
                "exchanged; give a directory of your own"
            )
        texts = {TICKET: f"{secrets.token_hex(32)}\n"}
        for who in (SERVER, CLIENT):
            public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
            half = f'curve\n    public-key = "{public}"\n'
            texts[f"{who}.key"] = half
            texts[f"{who}.key_secret"] = f'{half}    secret-key = "{secret}"\n'
        for name, text in texts.items():
            path = directory / name
            # O_EXCL: never through a link that somebody put there meanwhile.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            files.append(path)
            with open(fd, "w", encoding="ascii") as file:
                file.write(text)
    except OSError as error:
        for path in files:  # half a set would be in the way of the next call
            path.unlink(missing_ok=True)
        raise ConfigError(f"cannot write keys to {directory}: {error}") from error
    return files


def load_keys(directory: Path) -> Credentials:
    """The keys of ``curve_keys``.

    Raises:
        ConfigError: there are none, one is unreadable, or a secret is readable by everybody.
    """
    require_curve()
    _check_directory(directory)
    server, client = _pair(directory, SERVER), _pair(directory, CLIENT)
    if server is None and client is None:
        raise ConfigError(
            f"curve_keys={str(directory)!r} holds neither {SERVER}.key_secret nor "
            f"{CLIENT}.key_secret; make keys with: ec-connector keygen {directory}"
        )
    public = directory / f"{SERVER}.key"
    if os.path.lexists(public):
        server_public: bytes | None = public_key(public)
        if server is not None and server.public != server_public:
            raise ConfigError(
                f"{public} and {SERVER}.key_secret beside it do not belong together; all "
                "producers of a fleet share one server key, so copy both from where the keys "
                "were made"
            )
    else:
        server_public = server.public if server is not None else None
    if client is not None and server_public is None:
        raise ConfigError(
            f"curve_keys={str(directory)!r} holds no {SERVER}.key, so a producer could not be "
            "told from an impostor; copy that file from where the keys were made"
        )
    return Credentials(server, client, server_public)


def public_key(path: Path) -> bytes:
    """The public key in a file. Raises ConfigError."""
    return _read(path)[0]


def require_curve() -> None:
    """Raises ConfigError where ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError(
            "this libzmq was built without CURVE, so curve_keys cannot be used; "
            "install pyzmq from its own wheel"
        )


class AllowedKeys:
    """The client keys that may connect: one file, or every ``*.key`` of a directory.

    Looked at again when asked, at most once a second, so that a key added or removed
    counts without a restart.

    Raises:
        ConfigError: at first, when there is no key to be had. Later the last good list stays.
    """

    def __init__(self, path: Path, now: float) -> None:
        self._path = path
        self._next_look = now + 1.0
        self._stamp = self._look()
        self._keys = self._load()

    def __len__(self) -> int:
        return len(self._keys)

    def lack(self) -> str:
        """What to do about a list that lets nobody in; empty when it has a key."""
        if self._keys:
            return ""
        return (
            f"curve_allow={str(self._path)!r} is a directory without a key (*.key), so no consumer "
            "can connect; copy each consumer's client.key there under a name of its own"
        )

    def allows(self, key: bytes) -> bool:
        """Whether this public key (printable form) is on the list as last read."""
        return key in self._keys

    def refresh(self, now: float) -> bool:
        """Read the list again if it changed; whether it was read.

        Raises:
            ConfigError: it changed and cannot be used now. The last good list stays.
        """
        if now < self._next_look:
            return False
        self._next_look = now + 1.0
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp  # said once, not each second, when it cannot be used
        self._keys = self._load()
        return True

    def _files(self) -> list[Path]:
        if not self._path.is_dir():
            return [self._path]
        return sorted(self._path.glob("*.key"))[:_MAX_FILES]

    def _look(self) -> list[tuple[str, int, int, int]]:
        """What changes when a file does: also where files are links that are switched over."""
        found = []
        for path in self._files():
            try:
                facts = path.stat()
            except OSError:
                continue
            found.append((path.name, facts.st_ino, facts.st_mtime_ns, facts.st_size))
        return found

    def _load(self) -> frozenset[bytes]:
        files = self._files()
        if not self._path.exists():
            raise ConfigError(
                f"the allowed client keys {str(self._path)!r} do not exist; give a file or a "
                "directory of public keys (*.key) as curve_allow"
            )
        return frozenset(public_key(path) for path in files)


def _pair(directory: Path, who: str) -> Pair | None:
    path = directory / f"{who}.key_secret"
    if not os.path.lexists(path):  # a link that leads nowhere is a mistake to be told
        return None
    public, secret = _read(path, secret=True)
    if secret is None:
        raise ConfigError(f"{path} holds no secret key; make keys anew with ec-connector keygen")
    return Pair(public, secret)


def _check_directory(directory: Path) -> None:
    try:
        if directory.exists() and not directory.is_dir():
            raise ConfigError(
                f"curve_keys={str(directory)!r} is no directory; give the one made by "
                "ec-connector keygen, not a file in it"
            )
    except OSError as error:
        raise ConfigError(
            f"curve_keys={str(directory)!r} cannot be read: {error.strerror}"
        ) from None


def _read(path: Path, *, secret: bool = False) -> tuple[bytes, bytes | None]:
    """Public and secret key of a file. No error says what stands in it."""
    check_key_file(path, f"the key file {path}", secret=secret)
    try:
        public, private = load_certificate(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "no key in it"
        raise ConfigError(f"cannot use the key file {path}: {why}") from None
    for key in (public, private):
        try:
            if key is not None and (len(key) != _KEY_CHARS or len(z85.decode(key)) != 32):
                raise ValueError
        except (KeyError, ValueError, OverflowError):
            raise ConfigError(f"the key file {path} holds no CURVE key") from None
    if private is not None and zmq.curve_public(private) != public:
        raise ConfigError(f"the two keys in {path} do not belong together")
    return public, private
