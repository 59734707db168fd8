# SPDX-License-Identifier: Apache-2.0
"""A small OpenAI router for encoder disaggregation.

It sends the media of a chat request to an encoding server first, puts what that
server announces (``ec_transfer_params``) on the request to a decoding server, and
streams the answer through. Needs the ``proxy`` extra; importing this package alone
does not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until it is interrupted.

    ``argv`` are the command's options (``--encode URL --decode URL --port N`` and so
    on; by default this process's own). Returns the exit status: 0 after a normal
    end, 1 when the address cannot be bound or the ``proxy`` extra is missing. Wrong
    options end the process with status 2, as argparse does.
    """
    from ec_connector.proxy.options import parse_options

    options = parse_options(argv)
    try:
        from ec_connector.proxy.serve import serve
    except ModuleNotFoundError as error:
        print(f"the router needs {error.name}: pip install 'ec-connector[proxy]'", file=sys.stderr)
        return 1
    return serve(options)
