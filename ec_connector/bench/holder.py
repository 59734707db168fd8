# SPDX-License-Identifier: Apache-2.0
"""A producer in a process of its own, which the benchmark stops as a long engine step would."""

from __future__ import annotations

import sys

import msgspec

from ec_connector.bench.children import serve_parent
from ec_connector.bench.ours import filled, settings_for
from ec_connector.library import Producer


def main() -> None:
    """Hold so many items of so many bytes until the parent is done; says what they are."""
    nbytes, count = int(sys.argv[1]), int(sys.argv[2])
    extra = msgspec.json.decode(sys.argv[3])
    with Producer(**settings_for(nbytes, count, extra)) as producer:
        items = filled(producer, nbytes, [f"item-{number}" for number in range(count)])
        for _, answer in serve_parent():
            answer(msgspec.to_builtins(items))


if __name__ == "__main__":
    main()
