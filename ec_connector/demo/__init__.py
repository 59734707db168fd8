# SPDX-License-Identifier: Apache-2.0
"""The demo: a real producer/consumer pair on tiny models, beside an ordinary vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_NEEDS = {"rich": "cli", "PIL": "vllm", "aiohttp": "proxy", "vllm": "vllm"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with these options (by default this process's own).

    Returns 0 when every answer was right, 1 when anything was off or something is not
    installed, 130 after Ctrl-C. Wrong options end the process with status 2.
    """
    from importlib.util import find_spec

    from ec_connector.demo.options import parse_options

    options = parse_options(argv)
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({_NEEDS[name] for name in missing}))
        print(f"the demo needs {', '.join(missing)}: pip install 'ec-connector[{extras}]'",
              file=sys.stderr)  # fmt: skip
        return 1
    from ec_connector.demo.app import run

    return run(options)
