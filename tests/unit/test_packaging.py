# SPDX-License-Identifier: Apache-2.0
"""The wheel that users install, built from this tree."""

from __future__ import annotations

import configparser
import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ec_connector import __version__

pytest.importorskip("hatchling", reason="hatchling builds the wheel; it is in the test extra")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=50,
    )
    (built,) = target.glob("*.whl")
    return built


def read(wheel: Path, name: str) -> str:
    """A file of the wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"ec_connector-{__version__}.dist-info/{name}").decode()


def test_contents(wheel: Path) -> None:
    """The package, its typing marker and its licence are in it; tests and tools are not."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"ec_connector/__init__.py", "ec_connector/py.typed"} <= names
    assert f"ec_connector-{__version__}.dist-info/licenses/LICENSE" in names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"ec_connector", f"ec_connector-{__version__}.dist-info"}


def test_metadata(wheel: Path) -> None:
    """Installing it brings the three core libraries, never a vLLM or a torch."""
    metadata = email.message_from_string(read(wheel, "METADATA"))
    assert metadata["Name"] == "ec-connector"
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert sorted(text.partition(">")[0] for text in needed) == ["msgspec", "numpy", "pyzmq"]
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"cli", "proxy", "test", "vllm"} <= extras


def test_entry_points(wheel: Path) -> None:
    """vLLM, pytest and the shell find what is theirs, and each target exists in the wheel."""
    parser = configparser.ConfigParser(delimiters="=")
    parser.read_string(read(wheel, "entry_points.txt"))
    points = {section: dict(parser[section]) for section in parser.sections()}
    assert points["vllm.general_plugins"] == {"ec_connector": "ec_connector.plugin:register"}
    assert points["console_scripts"] == {"ec-connector": "ec_connector.cli:main"}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for section in points.values():
        for target in section.values():
            path = target.partition(":")[0].replace(".", "/")
            assert f"{path}.py" in names or f"{path}/__init__.py" in names


def test_imports_from_the_wheel(wheel: Path) -> None:
    """The built package works by itself, apart from this tree."""
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r})\n"
        "import ec_connector, ec_connector.config, ec_connector.plugin\n"
        "print(ec_connector.__file__, ec_connector.__version__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=wheel.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert done.stdout.split() == [f"{wheel}/ec_connector/__init__.py", __version__]
