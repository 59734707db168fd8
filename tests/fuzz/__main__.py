# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing: ``python -m tests.fuzz SECONDS [TARGET ...]``, every target by default.

Each target runs that long in a process of its own. What was found stays in ``.fuzz``: new inputs
in a folder by target, and whatever broke one as ``TARGET-crash-...``. ``--keep`` adds some
of the new inputs to the corpus of the repository.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).parent / "corpus"
GOLDEN = ROOT / "tests" / "golden" / "v1"
KEPT = 40
"""New inputs a target and run."""
FOUND = ROOT / ".fuzz"
LONGEST = {"walk": 512}
"""Bytes of an input, where it is not 4096."""


def fuzz(name: str, options: list[str]) -> int:
    """Run libFuzzer over one target; its exit status."""
    arguments = [sys.executable, "-m", "tests.fuzz.one", name, *options]
    return subprocess.run(arguments, cwd=ROOT, check=False).returncode


def main() -> int:
    """Exit status 1 if any target broke, hung or took too much memory."""
    from tests.fuzz.targets import TARGETS

    words = [word for word in sys.argv[1:] if word != "--keep"]
    if not words or not words[0].isdigit() or set(words[1:]) - set(TARGETS):
        print(f"{__doc__}\ntargets: {' '.join(TARGETS)}", file=sys.stderr)
        return 2
    broken = []
    for name in words[1:] or TARGETS:
        new, kept = FOUND / name, CORPUS / name
        new.mkdir(parents=True, exist_ok=True)
        kept.mkdir(parents=True, exist_ok=True)
        limits = ["-timeout=10", "-rss_limit_mb=2048", f"-max_len={LONGEST.get(name, 4096)}"]
        limits += [f"-artifact_prefix={FOUND / name}-", "-print_final_stats=1"]
        inputs = [str(new), str(kept), str(GOLDEN)]
        print(f"── {name}: {words[0]} s", flush=True)
        if fuzz(name, [f"-max_total_time={words[0]}", *limits, *inputs]):
            broken.append(name)
        elif "--keep" in sys.argv:
            for path in sorted(new.iterdir())[:KEPT]:  # named by digest: a sample
                shutil.copy(path, kept / path.name)
    print(f"fuzzed {words[0]} s each; broken: {', '.join(broken) or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
