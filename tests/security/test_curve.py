# SPDX-License-Identifier: Apache-2.0
"""CURVE between real agents: listed keys get in, everybody else gets nothing and is counted."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from ec_connector import Consumer, Producer
from ec_connector.agent.loop import Agent
from ec_connector.config import AgentOptions, Settings
from ec_connector.curve import AllowedKeys, load_keys, make_keys
from ec_connector.errors import ConfigError, PeerRefusedError, PeerUnreachableError
from ec_connector.protocol.fingerprint import Identity
from ec_connector.protocol.messages import XferReq, encode

SMALL: dict[str, Any] = {"pool_size": "4MiB"}
# Whole chunks among it: what CURVE adds to a full one must pass the size limit too.
ROWS = np.arange(600_000, dtype=np.float32).reshape(1000, 600)
PATIENCE = 10.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet's keys."""
    directory = tmp_path_factory.mktemp("fleet") / "keys"
    make_keys(directory)
    return directory


def consumers_part(keys: Path, to: Path) -> Path:
    """What a consumer needs of the keys, and no more."""
    to.mkdir(mode=0o700)
    for name in ("client.key_secret", "server.key"):
        shutil.copy2(keys / name, to / name)
    return to


def producers_part(keys: Path, to: Path) -> Path:
    """What a producer needs of the keys, and no more."""
    to.mkdir(mode=0o700)
    for name in ("server.key_secret", "client.key"):
        shutil.copy2(keys / name, to / name)
    return to


@pytest.mark.parametrize("planes", [["memory"], ["zmq"]], ids=lambda planes: planes[0])
def test_each_side_with_its_part_of_the_keys(keys: Path, planes: list[str], tmp_path: Path) -> None:
    """Bytes arrive by either plane when each side holds only what it needs."""
    here, there = producers_part(keys, tmp_path / "p"), consumers_part(keys, tmp_path / "c")
    with (
        Producer(curve_keys=str(here), planes=planes, **SMALL) as producer,
        Consumer(curve_keys=str(there), planes=planes, **SMALL) as consumer,
    ):
        again = consumer.fetch("a", producer.put("a", ROWS), timeout=PATIENCE)
    assert (again == ROWS).all()


@pytest.mark.parametrize("planes", [["memory"], ["zmq"]], ids=lambda planes: planes[0])
@pytest.mark.parametrize("who", ["no keys", "unlisted key", "another server's key"])
def test_others_get_nothing(keys: Path, planes: list[str], who: str, tmp_path: Path) -> None:
    """Memory of the same host is no way around the keys either."""
    theirs: dict[str, Any] = {"planes": planes, "connect_timeout": "500ms", **SMALL}
    if who != "no keys":
        make_keys(tmp_path / "other")
        if who == "unlisted key":
            shutil.copy2(keys / "server.key", tmp_path / "other" / "server.key")
            (tmp_path / "other" / "server.key_secret").unlink()
        theirs["curve_keys"] = str(tmp_path / "other")
    with Producer(curve_keys=str(keys), planes=planes, **SMALL) as producer:
        announcement = producer.put("a", ROWS)
        with (
            Consumer(**theirs) as consumer,
            pytest.raises((PeerRefusedError, PeerUnreachableError)),
        ):
            consumer.fetch("a", announcement, timeout=PATIENCE)


def test_a_plain_producer_is_not_believed(keys: Path) -> None:
    """A consumer with keys takes nothing from a peer that cannot prove the server's."""
    settings: dict[str, Any] = {"curve_keys": str(keys), "connect_timeout": "500ms", **SMALL}
    with Producer(**SMALL) as producer, Consumer(**settings) as consumer:
        announcement = producer.put("a", ROWS)
        with pytest.raises((PeerRefusedError, PeerUnreachableError)):
            consumer.fetch("a", announcement, timeout=PATIENCE)


def test_a_producers_part_does_not_fetch(keys: Path, tmp_path: Path) -> None:
    """Without a client key nothing is dialled, and the reason is said."""
    here = producers_part(keys, tmp_path / "p")
    with (
        Producer(curve_keys=str(keys), **SMALL) as producer,
        Consumer(curve_keys=str(here), **SMALL) as consumer,
        pytest.raises(PeerRefusedError, match=r"client\.key_secret"),
    ):
        consumer.fetch("a", producer.put("a", ROWS), timeout=PATIENCE)


class Served:
    """An agent in this process, turned by hand, and raw sockets that ask it."""

    def __init__(self, keys: Path, allow: Path | None = None) -> None:
        extra = {"curve_allow": str(allow)} if allow is not None else {}
        settings = Settings.parse({"curve_keys": str(keys), **SMALL, **extra})
        self.agent = Agent(AgentOptions(settings=settings, identity=Identity()))
        self.context = zmq.Context()
        self._dealers: list[Any] = []  # a dropped socket warns

    def dealer(self, server: bytes | None, public: bytes = b"", secret: bytes = b"") -> Any:
        """A peer's socket, connected; plain without the server's key."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger = 0
        if server is not None:
            dealer.curve_serverkey = server
            dealer.curve_publickey, dealer.curve_secretkey = public, secret
        dealer.connect(f"tcp://127.0.0.1:{self.agent.port}")
        self._dealers.append(dealer)
        return dealer

    def until(self, what: Callable[[], Any]) -> bool:
        """Turn the agent until something holds, or for long."""
        end = time.monotonic() + PATIENCE
        while not what() and time.monotonic() < end:
            self.agent.turn(20)
        return bool(what())

    def answered(self, dealer: Any, key: str = "a") -> bool:
        """Ask; whether an answer comes."""
        dealer.send_multipart([b"", encode(XferReq(key, "", session_id="s"))])
        return self.until(lambda: dealer.poll(0)) and bool(dealer.recv_multipart())

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.agent.close()


@pytest.fixture
def allow(keys: Path, tmp_path: Path) -> Path:
    """A directory of allowed keys with one in it."""
    directory = tmp_path / "allow"
    directory.mkdir()
    shutil.copy2(keys / "client.key", directory / "first.key")
    return directory


@pytest.fixture
def served(keys: Path, allow: Path) -> Iterator[Served]:
    """An agent that lets in whom the directory names."""
    served = Served(keys, allow)
    yield served
    served.close()


def test_the_list_is_read_again(served: Served, keys: Path, allow: Path, tmp_path: Path) -> None:
    """A key is let in when its file comes, and no longer served when it goes, connected or not."""
    credentials = load_keys(keys)
    make_keys(tmp_path / "second")
    second = load_keys(tmp_path / "second").client
    assert second is not None
    assert credentials.server_public is not None
    late = served.dealer(credentials.server_public, second.public, second.secret)
    late.send_multipart([b"", encode(XferReq("a", "", session_id="s"))])
    assert served.until(lambda: served.agent.stats()["peers_key_refused"] >= 1)
    assert not late.poll(0)
    shutil.copy2(tmp_path / "second" / "client.key", allow / "second.key")
    time.sleep(1.1)  # the list is looked at once a second
    # libzmq does not try again by itself after such a refusal.
    late = served.dealer(credentials.server_public, second.public, second.secret)
    assert served.answered(late)

    (allow / "second.key").unlink()
    time.sleep(1.1)
    dropped = served.agent.stats()["frames_dropped"]
    late.send_multipart([b"", encode(XferReq("a", "", session_id="s"))])
    assert served.until(lambda: served.agent.stats()["frames_dropped"] > dropped)
    assert not late.poll(0)

    first = credentials.client
    assert first is not None
    assert served.answered(served.dealer(credentials.server_public, first.public, first.secret))


def test_a_consumer_is_let_in_later(keys: Path, allow: Path, tmp_path: Path) -> None:
    """The same consumer, refused first, fetches when its key has been listed: no restart."""
    make_keys(tmp_path / "late")
    (tmp_path / "late" / "server.key_secret").unlink()
    shutil.copy2(keys / "server.key", tmp_path / "late" / "server.key")
    theirs: dict[str, Any] = {"curve_keys": str(tmp_path / "late"), "connect_timeout": "500ms"}
    with (
        Producer(curve_keys=str(keys), curve_allow=str(allow), **SMALL) as producer,
        Consumer(**theirs, **SMALL) as consumer,
    ):
        announcement = producer.put("a", ROWS)
        with pytest.raises((PeerRefusedError, PeerUnreachableError)):
            consumer.fetch("a", announcement, timeout=PATIENCE)
        shutil.copy2(tmp_path / "late" / "client.key", allow / "late.key")
        time.sleep(1.1)
        assert (consumer.fetch("a", announcement, timeout=PATIENCE) == ROWS).all()


def test_a_list_that_turns_bad_is_not_taken(served: Served, keys: Path, allow: Path) -> None:
    """The last good list stays in force, also when a broken file is put beside it."""
    (allow / "broken.key").write_text("nonsense")
    time.sleep(1.1)
    credentials = load_keys(keys)
    assert credentials.client is not None
    first = served.dealer(
        credentials.server_public, credentials.client.public, credentials.client.secret
    )
    assert served.answered(first)


def warnings_of_lack(caplog: pytest.LogCaptureFixture, allow: Path) -> int:
    """How often it was said that this directory lets nobody in."""
    said = f"curve_allow={str(allow)!r} is a directory without a key"
    return sum(said in record.getMessage() for record in caplog.records)


def test_a_list_without_a_key_is_said_at_start(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the setting and the directory; none when a key is in it."""
    (tmp_path / "nobody").mkdir()
    (tmp_path / "nobody" / "first.txt").write_text("not a key")
    Served(keys, tmp_path / "nobody").close()
    assert warnings_of_lack(caplog, tmp_path / "nobody") == 1
    shutil.copy2(keys / "client.key", tmp_path / "nobody" / "first.key")
    Served(keys, tmp_path / "nobody").close()
    assert warnings_of_lack(caplog, tmp_path / "nobody") == 1


def test_a_list_that_turns_empty_is_said(
    served: Served, keys: Path, allow: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Taking the last key off lets nobody in from then on, and is said once."""
    (allow / "first.key").unlink()
    time.sleep(1.1)  # the list is looked at once a second
    credentials = load_keys(keys)
    first = credentials.client
    assert first is not None
    late = [served.dealer(credentials.server_public, first.public, first.secret) for _ in range(2)]
    assert served.until(lambda: served.agent.stats()["peers_key_refused"] >= len(late))
    assert warnings_of_lack(caplog, allow) == 1


@pytest.mark.parametrize("kind", ["plain", "another server", "unlisted", "raw bytes"])
def test_refused_peers_leave_nothing(served: Served, keys: Path, kind: str, tmp_path: Path) -> None:
    """Many attempts, all counted; no frame, grant or parked request comes of them."""
    make_keys(tmp_path / "other")
    other = load_keys(tmp_path / "other")
    assert other.client is not None
    ours = load_keys(keys).server_public
    server = {"plain": None, "another server": other.server_public}.get(kind, ours)
    attempts = 10
    with served.dealer(None):
        before = len(os.listdir("/proc/self/fd"))  # with what the first socket brings along
    dealers = []
    for _ in range(attempts):
        if kind == "raw bytes":
            dealers.append(served.context.socket(zmq.STREAM))
            dealers[-1].linger = 0
            dealers[-1].connect(f"tcp://127.0.0.1:{served.agent.port}")
            dealers[-1].send_multipart([dealers[-1].recv_multipart()[0], b"GET / HTTP/1.1\r\n" * 9])
        else:
            dealers.append(served.dealer(server, other.client.public, other.client.secret))
            dealers[-1].send_multipart([b"", encode(XferReq("a", "", session_id="s"))])
    count = served.agent.stats

    def counted() -> bool:
        found = count()
        return found["peers_key_refused"] + found["peers_handshake_failed"] >= attempts

    # What is no ZMQ at all is closed by libzmq without a word.
    assert served.until(counted) or kind == "raw bytes"
    got_in = sum(bool(dealer.poll(0)) for dealer in dealers if kind != "raw bytes")
    for dealer in dealers:
        dealer.close(linger=0)
    found = count()
    assert (got_in, found["frames_dropped"], found["grants"], found["parked_now"]) == (0, 0, 0, 0)
    assert served.until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    print(f"{kind}: attempts {attempts}, got in {got_in}")


def test_without_a_server_secret_nobody_is_served(keys: Path, tmp_path: Path) -> None:
    """A consumer's agent listens too, and lets in not even the fleet's own client key."""
    served = Served(consumers_part(keys, tmp_path / "c"))
    try:
        credentials = load_keys(keys)
        assert credentials.client is not None
        dealer = served.dealer(
            credentials.server_public, credentials.client.public, credentials.client.secret
        )
        dealer.send_multipart([b"", encode(XferReq("a", "", session_id="s"))])
        assert served.until(lambda: served.agent.stats()["peers_handshake_failed"] >= 1)
        assert not dealer.poll(0)
    finally:
        served.close()


# ── the files ────────────────────────────────────────────────────────────────


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Whatever the umask: directory 0700, files 0600."""
    old = os.umask(0)
    try:
        files = make_keys(tmp_path / "new" / "keys")
    finally:
        os.umask(old)
    assert len(files) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "new" / "keys").stat().st_mode) == 0o700


def test_keys_are_not_overwritten(keys: Path) -> None:
    """One file that is there already is enough, and all stay as they are."""
    before = [path.read_bytes() for path in sorted(keys.iterdir())]
    with pytest.raises(ConfigError, match="already"):
        make_keys(keys)
    assert [path.read_bytes() for path in sorted(keys.iterdir())] == before


def test_bad_files_are_named_and_not_quoted(keys: Path, tmp_path: Path) -> None:
    """Each way for a file to be wrong is a ConfigError; no text of a secret is in it."""
    part = tmp_path / "keys"
    shutil.copytree(keys, part)
    secret_file = part / "server.key_secret"
    good = secret_file.read_text()
    secret = load_keys(keys).server
    assert secret is not None
    assert secret.secret.decode() not in repr(secret)
    for text in ("", "nonsense", good[:-10], good.replace("secret-key", "other"), "\0" * 99):
        secret_file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_keys(part)
        assert "server.key_secret" in str(caught.value)
        assert secret.secret.decode()[:12] not in str(caught.value)
    secret_file.write_text(good)
    secret_file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(part)
    secret_file.chmod(0o440)  # as a mounted Secret with a group of its own
    assert load_keys(part).server is not None


def test_nothing_there(tmp_path: Path) -> None:
    """No keys, or no list: said at start, with what to do."""
    with pytest.raises(ConfigError, match="ec-connector keygen"):
        load_keys(tmp_path)
    with pytest.raises(ConfigError, match="curve_allow"):
        AllowedKeys(tmp_path / "none", 0.0)
    with pytest.raises(ConfigError, match="set curve_keys too"):
        Settings.parse({"curve_allow": "list"})
