# SPDX-License-Identifier: Apache-2.0
"""The command: verbs, JSON, and exit statuses 0 good, 1 problem, 2 bad usage."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ec_connector import __version__
from ec_connector.config import SETTING_KEYS

pytest.importorskip("typer", reason="the cli extra is not installed")
from typer.testing import CliRunner

from ec_connector.cli import app as app_module
from ec_connector.cli import doctor

COMMAND = "import sys; from ec_connector.cli import main; sys.exit(main(sys.argv[1:]))"


def run(*arguments: str) -> Any:
    """The command's result, in this process."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(app_module.app, arguments)


def test_version() -> None:
    """The command tells the package's version, which is the distribution's."""
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.strip() == __version__


def test_help_names_every_verb() -> None:
    """--help lists what there is."""
    result = run("--help")
    assert result.exit_code == 0
    for verb in ("agent", "config", "demo", "doctor", "ping", "proxy", "top"):
        assert verb in result.stdout


VERBS = ("agent", "bench", "bench compare", "config", "demo", "doctor", "encode-server", "keygen",
         "ping", "proxy", "top")  # fmt: skip
WITHOUT_EXTRAS = """
import sys
for name in (
    "vllm", "torch", "PIL", "aiohttp", "starlette", "uvicorn", "onnxruntime", "transformers",
    "matplotlib", "nixl",
):
    sys.modules[name] = None
"""


@pytest.mark.parametrize("verb", VERBS)
def test_help_needs_no_extra(verb: str) -> None:
    """How to use a verb can be read before anything but the command is installed."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + COMMAND, *verb.split(), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert verb in result.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("demo",), "vllm"),
        (("proxy", "--encode", "http://e:1", "--decode", "http://d:1"), "proxy"),
        (("encode-server", "--graph", __file__, "--processor", "."), "encode-server"),
    ],
)
def test_what_is_missing_is_named(arguments: tuple[str, ...], extra: str) -> None:
    """A sentence with what to install, and status 1."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert f"ec-connector[{extra}]" in result.stderr.replace("proxy,vllm", "vllm")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [("nonsense",), ("config", "--nonsense"), ()])
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    """An unknown verb or option, or none at all, is status 2."""
    assert run(*arguments).exit_code == 2


def test_config_lists_every_key() -> None:
    """The table shows each key with its default; brackets in it are text."""
    result = run("config")
    assert result.exit_code == 0
    for key in SETTING_KEYS:
        assert key.name in result.stdout
    assert "1GiB" in result.stdout
    assert "127.0.0.0/8, ::1" in result.stdout


def test_config_as_json_is_itself_a_configuration() -> None:
    """The printed defaults can be given back and are good."""
    keys = json.loads(run("config", "--json").stdout)
    assert [key["key"] for key in keys] == [key.name for key in SETTING_KEYS]
    printed = json.dumps({key["key"]: key["default"] for key in keys})
    assert run("config", "--check", printed).exit_code == 0


def test_config_check(tmp_path: Path) -> None:
    """A good file is status 0, a bad one 1 with the reason, a missing one 2."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text('{"pool_size": "2GiB"}')
    bad.write_text('{"pol_size": "2GiB"}')
    assert run("config", "--check", str(good)).exit_code == 0
    result = run("config", "--check", str(bad))
    assert result.exit_code == 1
    assert "did you mean 'pool_size'?" in result.stderr
    result = run("config", "--check", str(tmp_path / "none.json"))
    assert result.exit_code == 2
    assert "none.json" in result.stderr


def test_config_check_as_json() -> None:
    """A checked configuration is printed whole, as the connector understood it."""
    result = run("config", "--check", '{"pool_size": "2GiB"}', "--json")
    assert json.loads(result.stdout)["pool_size"] == 2 << 30


def test_doctor_reports_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """One problem among the findings makes status 1; notes do not."""
    note = doctor.Finding("a", doctor.NOTE, "[worth] knowing")
    monkeypatch.setattr(doctor, "examine", lambda settings: [note])
    result = run("doctor")
    assert result.exit_code == 0
    assert "[worth] knowing" in result.stdout
    problem = doctor.Finding("b", doctor.PROBLEM, "broken")
    monkeypatch.setattr(doctor, "examine", lambda settings: [note, problem])
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)[1] == {"check": "b", "status": "problem", "text": "broken"}


def test_doctor_refuses_a_bad_configuration() -> None:
    """The configuration is checked before the host."""
    result = run("doctor", "--config", '{"port": -1}')
    assert result.exit_code == 1
    assert "port=-1" in result.stderr


@pytest.mark.parametrize("verb", ["demo", "proxy"])
def test_other_programs_get_their_own_options(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything after the verb, --help too, is passed on, and the status comes back."""
    seen: list[list[str]] = []

    def main(argv: list[str]) -> int:
        seen.append(argv)
        return 1

    monkeypatch.setattr(f"ec_connector.{verb}.main", main)
    result = run(verb, "--port", "8000", "--help", "--flag", "word")
    assert result.exit_code == 1
    assert seen == [["--port", "8000", "--help", "--flag", "word"]]


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (("--config", '{"pol_size": 1}'), 1, "did you mean 'pool_size'?"),
        (("--config", '{"agent": "ipc://@ec"}'), 1, "leave the key agent out"),
        (("--log-level", "loud"), 2, "log_level='LOUD'"),
    ],
)
def test_agent_refuses_bad_options(arguments: tuple[str, ...], status: int, part: str) -> None:
    """An agent that was told nonsense does not start, and says what was wrong."""
    result = run("agent", *arguments)
    assert result.exit_code == status
    assert part in result.stderr


def test_agent_runs_alone_until_it_is_stopped() -> None:
    """The verb serves, prints where, and ends with status 0 on SIGTERM."""
    settings = '{"pool_size": "1MiB"}'
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "agent", "--json", "--config", settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as agent:
        try:
            assert agent.stdout is not None
            facts = json.loads(agent.stdout.readline())
            assert facts["endpoint"].startswith("ipc://")
            assert facts["pool_bytes"] == 1 << 20
            with socket.create_connection((facts["peer_host"], facts["peer_port"]), timeout=10):
                pass
        finally:
            agent.terminate()
        assert agent.wait(timeout=20) == 0


def test_agent_that_cannot_listen_is_a_problem() -> None:
    """A port in use is status 1, and the message names it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, "agent", "--config", json.dumps({"port": port})],
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
    assert done.returncode == 1
    assert str(port) in done.stderr


def test_without_the_extra_one_line_says_what_to_install() -> None:
    """Without typer the command is status 2 and names the extra, with no traceback."""
    code = (
        "import sys; sys.modules['typer'] = None; "
        "from ec_connector.cli import main; sys.exit(main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 2
    assert done.stderr == "ec-connector needs typer: pip install 'ec-connector[cli]'\n"


def test_installed_command_runs() -> None:
    """The console script of this environment is ours."""
    script = Path(sys.executable).with_name("ec-connector")
    if not os.access(script, os.X_OK):
        pytest.skip("the package is not installed in this environment")
    done = subprocess.run(
        [script, "--version"], capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout.strip() == __version__


def test_keygen(tmp_path: Path) -> None:
    """Keys are made once; a second time nothing is touched and the status is 1."""
    made = run("keygen", "--json", str(tmp_path / "keys"))
    assert made.exit_code == 0
    files = json.loads(made.stdout)["files"]
    assert sorted(Path(name).name for name in files) == [
        "client.key",
        "client.key_secret",
        "server.key",
        "server.key_secret",
        "ticket_key",
    ]
    assert run("keygen", str(tmp_path / "keys")).exit_code == 1
    assert run("keygen").exit_code == 2
    assert "curve_keys" in run("keygen", str(tmp_path / "more")).stdout


@pytest.mark.parametrize("verb", [("config", "--check"), ("doctor", "--config")])
def test_settings_that_cannot_be_read(verb: tuple[str, str], tmp_path: Path) -> None:
    """An unset variable, another encoding, text too deep: a sentence, never a traceback."""
    latin = tmp_path / "latin.json"
    latin.write_bytes('{"bind_host": "caf\u00e9"}'.encode("latin-1"))
    for text, status, why in (
        ("", 2, "no settings given"),
        (str(latin), 2, "save it as UTF-8"),
        ('{"bind_host": "\udcff"}', 1, "not JSON"),
        ('{"x":' + "[" * 200_000 + "]" * 200_000 + "}", 1, "not JSON"),
    ):
        result = run(*verb, text)
        assert result.exit_code == status, text[:20]
        assert why in result.stderr


def test_settings_from_another_editor(tmp_path: Path) -> None:
    """A byte order mark before the object is no error."""
    file = tmp_path / "settings.json"
    file.write_bytes(b'\xef\xbb\xbf{"port": 15000}')
    assert run("config", "--check", str(file)).exit_code == 0


def test_keygen_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty name makes no keys in the directory one happens to be in."""
    monkeypatch.chdir(tmp_path)
    assert run("keygen", "").exit_code == 2
    assert list(tmp_path.iterdir()) == []
