# SPDX-License-Identifier: Apache-2.0
"""Another user of the same host: neither the region nor the agent's local socket is his."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from ec_connector import Producer

NOBODY = 65534
# Becomes the other user by itself, who may not be able to start this Python.
TRY = """\
import os, socket, sys
what, where, uid = sys.argv[1:]
if int(uid) != os.getuid():
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
try:
    if what == "socket":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(1)
            s.connect("\\0" + where)
            print("ended" if s.recv(1) == b"" else "answered")
    else:
        with open(where, what) as file:
            file.read(1)
        print("opened")
except TimeoutError:
    print("open")  # the agent waits for the first word
except (PermissionError, ConnectionResetError) as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def producer() -> Iterator[Producer]:
    """A producer with something in its pool."""
    with Producer(pool_size="1MiB") as producer:
        producer.put("a", np.arange(100))
        yield producer


def outcome(what: str, where: str, uid: int) -> str:
    """What comes of trying as this user."""
    if os.getuid() != 0 and uid != os.getuid():
        pytest.skip("only root can become another user")
    child = subprocess.run(
        [sys.executable, "-I", "-S", "-c", TRY, what, where, str(uid)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return child.stdout.strip()


@pytest.mark.parametrize("mode", ["rb", "r+b"])
def test_region(producer: Producer, mode: str) -> None:
    """Its own user opens it, which shows that the place is right; another one does not."""
    ref = producer._welcome.region
    where = f"/proc/{ref.pid}/fd/{ref.fd}"
    assert outcome(mode, where, os.getuid()) == "opened"
    assert outcome(mode, where, NOBODY) == "PermissionError"


def test_local_socket(producer: Producer) -> None:
    """Its own user is listened to; another one is cut off before he has said anything."""
    where = producer._link.endpoint.removeprefix("ipc://@")
    assert outcome("socket", where, os.getuid()) == "open"
    assert outcome("socket", where, NOBODY) in ("ended", "ConnectionResetError")


def test_memory_of_the_agent(producer: Producer) -> None:
    """Keys lie in the agent's memory and in what it was told at its start."""
    for name in ("mem", "environ", "maps"):
        where = f"/proc/{producer.agent_pid}/{name}"
        assert outcome("rb", where, NOBODY) == "PermissionError"
