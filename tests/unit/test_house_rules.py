# SPDX-License-Identifier: Apache-2.0
"""A linter for the mistakes that would hurt here most, over the package's own source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ec_connector"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SPDX = "# SPDX-License-Identifier: Apache-2.0"

# Each of these runs what a peer, a file or a shell says.
DANGEROUS_MODULES = {"cPickle", "cloudpickle", "dill", "marshal", "pickle", "shelve"}
DANGEROUS_NAMES = {"eval", "exec"}
DANGEROUS_METHODS = {"recv_pyobj", "send_pyobj"}
DANGEROUS_CALLS = {("os", "system"), ("os", "popen"), ("torch", "load"), ("numpy", "load"),
                   ("np", "load")}  # fmt: skip
# State machines get the time passed in, and do no I/O.
IMPURE_MODULES = {"asyncio", "select", "selectors", "socket", "subprocess", "threading", "time"}
PURE_FOLDERS = ("protocol",)
PURE_FILES = (
    "pool/blocks.py", "pool/extents.py", "pool/pins.py", "pool/story.py",
    "proxy/circuit.py", "proxy/clean.py", "proxy/events.py", "proxy/headers.py",
    "proxy/instances.py", "proxy/media.py", "proxy/placement.py", "proxy/rewrite.py",
)  # fmt: skip

# vLLM moves; what follows its moves is kept in few places.
VLLM_FILES = {
    "bench/in_tree_side.py",  # times vLLM's own classes
    "connector.py",
    "engine/_compat.py",
    "engine/metrics.py",
    "engine/scheduler.py",
    "engine/worker.py",
    "plugin.py",
}
TORCH_FILES = VLLM_FILES | {"engine/device.py"}


def imported(node: ast.AST) -> Iterator[str]:
    """Top-level packages that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]


def dangers(tree: ast.AST) -> Iterator[str]:
    """Calls and imports that execute foreign data, or share ZMQ's global context."""
    for node in ast.walk(tree):
        yield from (f"import {name}" for name in imported(node) if name in DANGEROUS_MODULES)
        if not isinstance(node, ast.Call):
            continue
        if any(word.arg == "shell" for word in node.keywords):
            yield "shell="
        if isinstance(node.func, ast.Name) and node.func.id in DANGEROUS_NAMES:
            yield node.func.id
        if isinstance(node.func, ast.Attribute):
            owner = node.func.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if node.func.attr in DANGEROUS_METHODS or (name, node.func.attr) in DANGEROUS_CALLS:
                yield node.func.attr
            if (name, node.func.attr) == ("Context", "instance"):
                yield "Context.instance"


def unread_lengths(tree: ast.AST) -> Iterator[int]:
    """Lines where the result of ``recv_into`` is dropped: it truncates without a word."""
    for node in ast.walk(tree):
        dropped = isinstance(node, ast.Expr) or (
            isinstance(node, ast.Assign)
            and all(isinstance(target, ast.Name) and target.id == "_" for target in node.targets)
        )
        value = getattr(node, "value", None) if dropped else None
        if isinstance(value, ast.Await):
            value = value.value
        if (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and value.func.attr in ("recv_into", "recvmsg_into", "recvfrom_into")
        ):
            yield value.lineno


def impurities(tree: ast.AST) -> list[str]:
    """Imports that give a state machine a clock, a thread or a socket."""
    return [name for node in ast.walk(tree) for name in imported(node) if name in IMPURE_MODULES]


class WithoutTypeChecking(ast.NodeTransformer):
    """Drops what only a type checker sees."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node.orelse
        return self.generic_visit(node)


def packages_at_run_time(text: str) -> set[str]:
    """Top-level packages that a source imports, at its top or inside a function."""
    tree = WithoutTypeChecking().visit(ast.parse(text))
    return {name for node in ast.walk(tree) for name in imported(node)}


def is_pure(path: Path) -> bool:
    """Whether a source file must keep to pure functions of its inputs."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] in PURE_FOLDERS or relative.as_posix() in PURE_FILES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_keeps_the_rules(path: Path) -> None:
    """No foreign data is executed, no length is dropped, pure files stay pure, licence stated."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert not list(dangers(tree))
    assert not list(unread_lengths(tree)), "recv_into truncates silently: use its result"
    assert not (is_pure(path) and impurities(tree))
    assert not text or text.startswith(f"{SPDX}\n")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_vllm_and_torch_stay_where_they_belong(path: Path) -> None:
    """Only the engine-side files import vLLM and torch; the demo drives vLLM as a program."""
    name = path.relative_to(PACKAGE).as_posix()
    packages = packages_at_run_time(path.read_text(encoding="utf-8"))
    assert "vllm" not in packages or name in VLLM_FILES
    assert "torch" not in packages or name in TORCH_FILES or name.startswith("demo/")


@pytest.mark.parametrize("folder", ["tests", "tools", "examples", "bench"])
def test_licence_is_stated_everywhere(folder: str) -> None:
    """Every Python file of the repository names its licence in its first line."""
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not text or text.startswith(f"{SPDX}\n"), path


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal, os",
        "eval(text)",
        "exec(text)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "torch.load(path)",
        "np.load(path)",
        "socket.recv_pyobj()",
        "self.socket.recv_pyobj()",
        "zmq.Context.instance()",
    ],
)
def test_dangers_are_seen(bad: str) -> None:
    """The linter finds each of the things it is there for."""
    assert list(dangers(ast.parse(bad)))


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("s.recv_into(b)", [1]),
        ("_ = s.recv_into(b)", [1]),
        ("async def f():\n    await s.recv_into(b)", [2]),
        ("n = s.recv_into(b)", []),
        ("if s.recv_into(b) != 3: raise E", []),
        ("return_(s.recv_into(b))", []),
    ],
)
def test_dropped_lengths_are_seen(code: str, lines: list[int]) -> None:
    """A dropped result is found; one that is looked at is not."""
    assert list(unread_lengths(ast.parse(code))) == lines


def test_impurities_are_seen() -> None:
    """Imports inside functions count too; our own modules do not."""
    assert impurities(ast.parse("def f():\n    from time import monotonic")) == ["time"]
    assert impurities(ast.parse("import ec_connector.time")) == []


def test_type_checking_imports_do_not_count() -> None:
    """An import for the type checker alone costs nothing; any other is seen, however deep."""
    quiet = "if TYPE_CHECKING:\n    import vllm\nelse:\n    import numpy"
    assert packages_at_run_time(quiet) == {"numpy"}
    assert packages_at_run_time("def f():\n    from vllm.config import X") == {"vllm"}
