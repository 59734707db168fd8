# SPDX-License-Identifier: Apache-2.0
"""Stages with real worker processes: what they do, and how each failure is told."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zmq

from ec_connector.curve import make_keys
from ec_connector.errors import ConfigError
from ec_connector.stage.caller import Stage
from ec_connector.stage.errors import StageDeadlineError, StageError, StageLostError
from ec_connector.stage.messages import Ok, pack
from ec_connector.stage.process import OwnStage

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNTIME = "plain_runtime:Plain"
KINDS = ("good", "dies", "stops", "hangs", "raises", "text", "much", "unloadable")
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def graphs(tmp_path, monkeypatch):
    """A "file" for each thing that a graph can do, and a path on which the runtime is found."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{ROOT}")
    for kind in KINDS:
        (tmp_path / kind).write_text(kind)
    return {kind: tmp_path / kind for kind in KINDS}


@pytest.fixture
def stage(graphs):
    """A worker of our own."""
    with OwnStage(graphs, runtime=RUNTIME, payload_limit=1 << 20) as one:
        yield one


@pytest.fixture
def start(graphs):
    """Starts workers by command line; ends them."""
    started = []

    def start(*options):
        command = [sys.executable, "-P", "-m", "ec_connector.stage", "--runtime", RUNTIME]
        command += ["--graph", f"good={graphs['good']}", "--graph", f"hangs={graphs['hangs']}"]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def address_of(worker):
    """Where a worker said that it listens."""
    return json.loads(worker.stdout.readline())["address"]


def test_hello_load_run_stats(stage):
    """Each operation's answer, from a process that is not this one."""
    facts = stage.hello()
    assert facts["pid"] == stage.pid != os.getpid()
    assert facts["python"] == platform.python_version()
    assert facts["versions"]["numpy"] == np.__version__
    assert facts["providers"] == ["Plain"]
    assert facts["graphs"] == sorted(KINDS)
    loaded = stage.load("good")
    assert (loaded["device"], loaded["provider"]) == ("cpu", "Plain")
    assert loaded["metadata"] == {"made": "by hand"}
    assert loaded["why"] == "there is nothing else"
    assert loaded["inputs"] == [{"name": "x", "dtype": "float32", "shape": [-1, 4]}]
    out = stage.run("good", {"x": X.T.copy().T})  # not in C order
    assert np.array_equal(out["double"], 2 * X)
    assert out["shape"].tolist() == [2, 4]
    out["double"][:] = 0  # ours
    assert list(stage.run("good", {"x": X}, ["shape"])) == ["shape"]
    stats = stage.stats()
    assert (stats["runs"], stats["failures"], stats["loaded"]) == (2, 0, ["good"])
    assert stats["bytes_in"] == 2 * X.nbytes
    assert stats["memory_bytes"] > 1 << 20


@pytest.mark.parametrize(
    ("graph", "inputs", "code", "words"),
    [
        ("good", {}, "bad_input", "'x' is missing"),
        ("good", {"x": X, "y": X}, "bad_input", "'y' is no input"),
        ("good", {"x": X.astype(np.float64)}, "bad_input", "'x' is <f8, not float32"),
        ("good", {"x": X[:, :3]}, "bad_input", r"shape \[2, 3\], not \[-1, 4\]"),
        ("raises", {"x": X}, "failed", "ZeroDivisionError: of the runtime's own"),
        ("text", {"x": X}, "bad_input", "'double' cannot be sent"),
        ("much", {"x": X}, "too_large", "exceed the limit of 1048576"),
    ],
)
def test_a_run_that_fails_is_told_and_the_next_one_works(stage, graph, inputs, code, words):
    """Wrong inputs, an error in the graph, results that cannot be sent: by code, and in words."""
    stage.load(graph)
    with pytest.raises(StageError, match=words) as raised:
        stage.run(graph, inputs)
    assert raised.value.code == code
    assert f"code {code}" in str(raised.value)
    stage.load("good")
    assert np.array_equal(stage.run("good", {"x": X})["double"], 2 * X)


def test_the_workers_traceback_is_in_the_text(stage):
    """Message, code and traceback of the other side."""
    stage.load("raises")
    with pytest.raises(StageError) as raised:
        stage.run("raises", {"x": X})
    for words in ("of the runtime's own", "(code failed)", "plain_runtime.py", "in run"):
        assert words in str(raised.value)


def test_graphs_that_cannot_be_loaded(stage):
    """A name the worker does not have, a file that is none, one that was not loaded."""
    with pytest.raises(StageError, match=r"no graph '/etc/passwd'.*started with dies, good") as no:
        stage.load("/etc/passwd")
    assert no.value.code == "unknown_graph"
    with pytest.raises(StageError, match="ValueError: this is no graph"):
        stage.load("unloadable")
    with pytest.raises(StageError, match="load it first") as early:
        stage.run("good", {"x": X})
    assert early.value.code == "not_loaded"
    stage.load("good")
    with pytest.raises(StageError, match=r"gives double, shape, not \['nothing'\]"):
        stage.run("good", {"x": X}, ["nothing"])


def test_a_worker_that_dies_in_run(graphs):
    """The caller knows at once, and how it ended; later calls fail at once too."""
    with OwnStage(graphs, runtime=RUNTIME) as stage:
        stage.load("dies")
        began = time.monotonic()
        with pytest.raises(StageLostError, match=r"was ended by SIGKILL while .* to answer run"):
            stage.run("dies", {"x": X}, timeout=30.0)
        assert time.monotonic() - began < 15.0
        with pytest.raises(StageLostError, match="make another stage"):
            stage.stats()


@pytest.mark.parametrize("kind", ["hangs", "stops"])
def test_a_worker_that_hangs_in_run(graphs, kind):
    """A clear error at the deadline; closing ends the worker although it hangs."""
    stage = OwnStage(graphs, runtime=RUNTIME)
    with stage:
        stage.load(kind)
        with pytest.raises(StageDeadlineError, match=r"to answer run, longer than 0\.7 s"):
            stage.run(kind, {"x": X}, timeout=0.7)
        with pytest.raises(StageLostError, match="make another stage"):
            stage.run(kind, {"x": X})
    assert stage.ended() == "was ended by SIGKILL"


def test_a_worker_that_cannot_start(graphs):
    """An interpreter that is not there, and a runtime that is not."""
    with pytest.raises(ConfigError, match="cannot start /no/python"):
        OwnStage(graphs, python=["/no/python"])
    with pytest.raises(StageLostError, match="ended with status 2"):
        OwnStage(graphs, runtime="nothing:There")


def test_a_worker_ends_with_its_owner(graphs):
    """Also when the owner is killed while a graph runs."""
    code = (
        "import numpy, sys, threading, time; from pathlib import Path\n"
        "from ec_connector.stage.process import OwnStage\n"
        f"stage = OwnStage({{'hangs': Path({str(graphs['hangs'])!r})}}, runtime={RUNTIME!r})\n"
        "stage.load('hangs')\n"
        "x = numpy.zeros((2, 4), numpy.float32)\n"
        "threading.Thread(target=stage.run, args=('hangs', {'x': x}), daemon=True).start()\n"
        "time.sleep(0.5)\n"
        "print(stage.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    worker = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until = time.monotonic() + 20.0
    while Path(f"/proc/{worker}/stat").exists() and time.monotonic() < until:
        if Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break  # ended; whoever took the orphan has not waited for it
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{worker}").exists()


def test_a_worker_that_listens_serves_several(start):
    """Two callers, one after the other and at once; one that leaves takes nothing with it."""
    worker = start("--listen", "127.0.0.1:0")
    address = address_of(worker)
    with Stage(connect=address) as one, Stage(connect=address) as two:
        one.load("good")
        assert np.array_equal(one.run("good", {"x": X})["double"], 2 * X)
        assert np.array_equal(two.run("good", {"x": 3 * X})["double"], 6 * X)
        one.close()
        assert two.stats()["runs"] == 2


def test_a_worker_that_is_killed_elsewhere(start):
    """Without its process at hand the connection tells."""
    worker = start("--listen", "127.0.0.1:0")
    with Stage(connect=address_of(worker)) as stage:
        stage.load("hangs")
        began = time.monotonic()
        worker.send_signal(signal.SIGKILL)
        with pytest.raises(StageLostError, match="ended or the connection to it broke"):
            stage.run("hangs", {"x": X}, timeout=40.0)
        assert time.monotonic() - began < 20.0


def test_a_worker_connects_to_its_caller(start):
    """The first to come is taken, and missed when it is killed."""
    with Stage(listen="127.0.0.1:0") as stage:
        worker = start("--connect", stage.address)
        assert stage.hello()["pid"] == worker.pid
        stage.load("good")
        assert np.array_equal(stage.run("good", {"x": X})["double"], 2 * X)
        start("--connect", stage.address)  # the first one was taken
        assert stage.hello()["pid"] == worker.pid
        worker.send_signal(signal.SIGKILL)
        with pytest.raises(StageLostError, match="the connection to it broke"):
            stage.run("good", {"x": X}, timeout=40.0)


@pytest.mark.parametrize(("polite", "status"), [(True, 0), (False, 1)])
def test_a_worker_that_connected_ends_with_its_caller(start, polite, status):
    """In order when the caller is done, with an error when the caller is gone."""
    stage = Stage(listen="127.0.0.1:0")
    worker = start("--connect", stage.address)
    assert stage.hello()["pid"] == worker.pid
    if not polite:
        stage._link.close()
    else:
        stage.close()
    assert worker.wait(20.0) == status


def test_nobody_there():
    """No worker at an address, none that connects: told at the deadline."""
    with Stage(connect="127.0.0.1:9") as stage, pytest.raises(StageDeadlineError):
        stage.hello(0.3)
    with (
        Stage(listen="127.0.0.1:0") as stage,
        pytest.raises(StageDeadlineError, match=r"to connect, longer than 0\.3 s"),
    ):
        stage.hello(0.3)
    for bad in ({}, {"connect": "a:1", "listen": "b:1"}, {"listen": "nonsense"}):
        with pytest.raises(ConfigError):
            Stage(**bad)


def test_an_impostor_is_not_taken_for_our_worker(graphs):
    """Something else that connects first and has no token is not heard."""
    with (
        Stage(listen="127.0.0.1:0", token="right") as stage,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as other,
    ):
        other.linger = 0
        other.connect(f"tcp://{stage.address}")
        other.send(pack(Ok(id=0, facts={"token": "wrong"}), {}, 0)[0])
        with pytest.raises(StageDeadlineError, match="to connect"):
            stage.hello(0.5)


def test_garbage_does_not_end_a_worker(start):
    """Frames that are no messages, one that is too long, an operation that is not known."""
    worker = start("--listen", "127.0.0.1:0")
    address = address_of(worker)
    with zmq.Context() as context:
        for frames in ([b"garbage"], [b"", b""], [b"\x81\xa1t\xa5other"], [bytes(2 << 20)]):
            with context.socket(zmq.DEALER) as other:
                other.linger = 500
                other.connect(f"tcp://{address}")
                other.send_multipart(frames)
                if len(frames) == 1 and len(frames[0]) < 100:
                    assert other.poll(10_000), "a refusal is answered"
                    assert b"bad_message" in other.recv()
    with Stage(connect=address) as stage:
        assert stage.hello()["pid"] == worker.pid


@pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq has no CURVE")
def test_keys(start, tmp_path):
    """With keys the right caller is served, and one with other keys or none is not."""
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys)
    make_keys(others)
    (others / "server.key").write_text((keys / "server.key").read_text())
    (others / "server.key_secret").unlink()
    worker = start("--listen", "127.0.0.1:0", "--curve-keys", str(keys))
    address = address_of(worker)
    with Stage(connect=address, curve_keys=keys) as stage:
        assert stage.hello()["pid"] == worker.pid
        for wrong in (others, None):
            with (
                Stage(connect=address, curve_keys=wrong) as stranger,
                pytest.raises((StageLostError, StageDeadlineError)),
            ):
                stranger.hello(1.0)
        assert stage.hello()["pid"] == worker.pid


def test_bad_usage(graphs):
    """Options that cannot be are told in one line, status 2."""
    for options, words in (
        (["--listen", "x"], "host:port"),
        (["--listen", "127.0.0.1:0", "--graph", "good"], "NAME=FILE"),
        (["--listen", "127.0.0.1:0", "--graph", "a=/no/file"], "there is no /no/file"),
        (["--listen", "127.0.0.1:0", "--runtime", "json"], "module:Class"),
        (["--listen", "127.0.0.1:0", "--payload-limit", "much"], "'much' is not a size"),
    ):
        command = [sys.executable, "-P", "-m", "ec_connector.stage", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 2
        assert words in done.stderr
