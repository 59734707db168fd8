# SPDX-License-Identifier: Apache-2.0
"""The check that tests leave nothing behind: it finds each kind, and lets clean tests pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SUITE = """
import mmap, os, socket, subprocess, sys, threading, time
import pytest

kept = []
in_memory = f"/dev/shm/left-by-{os.getpid()}"

def test_thread():
    thread = threading.Thread(target=time.sleep, args=[30], daemon=True)
    thread.start()

def test_descriptor():
    kept.append(os.open("/dev/null", os.O_RDONLY))

def test_socket():
    kept.append(socket.socket())

def test_region():
    fd = os.memfd_create("left")
    os.truncate(fd, 4096)
    kept.append(mmap.mmap(fd, 4096))
    os.close(fd)

def test_child():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))

def test_zombie():
    pid = os.fork()
    if not pid:
        os._exit(0)

def test_orphan():
    code = '''
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
'''
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True)
    kept.append(int(out.stdout))

def test_shared_memory():
    with open(in_memory, "w") as file:
        file.write("x")

@pytest.mark.leaves("")
def test_no_reason():
    pass

@pytest.mark.leaves("to see whether it is let through")
def test_with_a_reason():
    kept.append(os.open("/dev/null", os.O_RDONLY))

def test_clean():
    thread = threading.Thread(target=time.sleep, args=[0.3])
    thread.start()
    one, other = socket.socketpair()
    one.close()
    other.close()
    subprocess.run([sys.executable, "-c", ""])

@pytest.fixture(scope="module")
def shared():
    one, other = socket.socketpair()
    yield one
    one.close()
    other.close()

def test_of_a_shared_fixture(shared):
    assert shared.fileno() > 0

def test_the_end():
    for one in kept:
        if isinstance(one, subprocess.Popen):
            one.kill()
            one.wait()
    os.kill(kept[-2], 9)
    os.unlink(in_memory)
"""

FOUND = {
    "test_thread": "thread <Thread(Thread-",
    "test_descriptor": "/dev/null",
    "test_socket": "socket:",
    "test_region": "memfd:left",
    "test_child": "time.sleep(60)",
    "test_zombie": "not waited for",
    "test_orphan": "time.sleep(60)",
    "test_shared_memory": "shared memory left-by-",
    "test_no_reason": "needs the reason",
}


def test_each_kind_is_found(tmp_path: Path) -> None:
    """An error in exactly those tests that leave something, and it is named."""
    text = CONFTEST.read_text(encoding="utf-8").replace("A_MOMENT = 5.0", "A_MOMENT = 0.5")
    (tmp_path / "conftest.py").write_text(text, encoding="utf-8")
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-W", "ignore",
         "--disable-warnings", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    errors = {
        line.split("::")[1].split(" ")[0]: line
        for line in ran.stdout.splitlines()
        if line.startswith("ERROR ")
    }
    assert errors.keys() == FOUND.keys(), ran.stdout
    for test, words in FOUND.items():
        section = ran.stdout.split(f"{test} _", 1)[1].partition("\n____")[0]
        assert words in section, f"{test}: {section}"
