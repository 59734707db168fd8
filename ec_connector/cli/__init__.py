# SPDX-License-Identifier: Apache-2.0
"""The ``ec-connector`` command. Exit status: 0 good, 1 found a problem, 2 bad usage."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb of the command; ``argv`` None means this process's own arguments.

    Ends by SystemExit once a verb has run; returns 2 where the ``cli`` extra is
    not installed.
    """
    try:
        from ec_connector.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich"):
            raise
        print(f"ec-connector needs {error.name}: pip install 'ec-connector[cli]'", file=sys.stderr)
        return 2
    app(args=argv, prog_name="ec-connector")
    return 0
