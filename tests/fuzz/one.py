# SPDX-License-Identifier: Apache-2.0
"""One target under atheris: ``python -m tests.fuzz.one TARGET LIBFUZZER-OPTIONS``."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["ec_connector", "tests.fuzz"]):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()
