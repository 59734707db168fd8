# SPDX-License-Identifier: Apache-2.0
"""Files of keys that are none: named at once, never waited for, never advice that does harm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ec_connector.curve import AllowedKeys, load_keys, make_keys
from ec_connector.errors import ConfigError
from ec_connector.ticket_file import load_tickets


def _pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)
    path.chmod(0o600)


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


BAD: list[tuple[Callable[[Path], None], str]] = [
    (_pipe, "no regular file"),
    (_huge, "more than any key file"),
    (_dangling, "No such file"),
    (Path.mkdir, "no regular file"),
]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A directory of good keys."""
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.mark.parametrize(("make", "why"), BAD)
@pytest.mark.parametrize("name", ["server.key_secret", "client.key_secret", "server.key"])
def test_curve_keys_that_are_no_files(
    keys: Path, name: str, make: Callable[[Path], None], why: str
) -> None:
    """A pipe, something huge, a dangling link, a directory: refused at once with the path."""
    (keys / name).unlink()
    make(keys / name)
    with pytest.raises(ConfigError, match=why) as caught:
        load_keys(keys)
    assert str(keys / name) in str(caught.value)


@pytest.mark.parametrize(("make", "why"), BAD)
def test_ticket_keys_that_are_no_files(
    tmp_path: Path, make: Callable[[Path], None], why: str
) -> None:
    """The same for ticket_key."""
    make(tmp_path / "ticket_key")
    with pytest.raises(ConfigError, match=why) as caught:
        load_tickets(str(tmp_path / "ticket_key"))
    assert "ticket_key=" in str(caught.value)


def test_a_list_of_clients_that_is_a_pipe(keys: Path) -> None:
    """The re-read list is read in the agent's loop: a pipe there would stop it for ever."""
    (keys / "client.key").unlink()
    _pipe(keys / "client.key")
    with pytest.raises(ConfigError, match="no regular file"):
        AllowedKeys(keys / "client.key", 0.0)


@pytest.mark.parametrize("name", ["/dev/null", "/dev/zero", "/tmp", "\0"])
def test_no_advice_to_close_what_everybody_needs(name: str) -> None:
    """What is world-readable and no file is not answered with chmod."""
    with pytest.raises(ConfigError) as caught:
        load_tickets(name)
    assert "chmod" not in str(caught.value)


def test_a_file_in_place_of_the_directory(keys: Path) -> None:
    """curve_keys names the directory; a file in it is a likely slip, and is not overwritten."""
    with pytest.raises(ConfigError, match="no directory") as caught:
        load_keys(keys / "server.key")
    assert "make keys" not in str(caught.value)


def test_pairs_that_were_exchanged(keys: Path, tmp_path: Path) -> None:
    """Server keys of two fleets, or server and client exchanged, are told at start."""
    make_keys(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "server.key", keys)
    with pytest.raises(ConfigError, match="do not belong together"):
        load_keys(keys)
    shutil.copy(keys / "client.key", keys / "server.key")
    with pytest.raises(ConfigError, match="do not belong together"):
        load_keys(keys)


def test_keygen_leaves_a_directory_as_it_was(tmp_path: Path) -> None:
    """Modes of a directory that others use stay; one that others may write to is refused."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    make_keys(tmp_path / "shared")
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    with pytest.raises(ConfigError, match="may write"):
        make_keys(tmp_path / "open")
    assert list((tmp_path / "open").iterdir()) == []
    assert (tmp_path / "open").stat().st_mode & 0o7777 == 0o1777


def test_half_a_set_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a file cannot be written the next call starts from nothing again."""
    real, left = os.open, [3]

    def open_until_full(path: Path, flags: int, mode: int = 0o777) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return real(path, flags, mode)

    monkeypatch.setattr("ec_connector.curve.os.open", open_until_full)
    with pytest.raises(ConfigError, match="No space left"):
        make_keys(tmp_path / "keys")
    assert list((tmp_path / "keys").iterdir()) == []
    monkeypatch.undo()
    assert len(make_keys(tmp_path / "keys")) == 5
