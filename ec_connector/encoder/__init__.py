# SPDX-License-Identifier: Apache-2.0
"""``ec-connector encode-server``: an encoder instance that is not vLLM.

It takes the chat requests that a router sends to an encoder, runs the images through a graph
in a stage worker, keeps the rows in its agent's pool and answers with ``ec_transfer_params``.
Needs the extra ``encode-server``; importing this package alone does not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Returns 0, 1 when it cannot serve, 2 for wrong options."""
    from ec_connector.encoder.options import parse_options

    options = parse_options(argv)
    try:
        from ec_connector.encoder.serve import serve
    except ModuleNotFoundError as error:
        print(
            f"the encoder needs {error.name}: pip install 'ec-connector[encode-server]'",
            file=sys.stderr,
        )
        return 1
    return serve(options)
