# SPDX-License-Identifier: Apache-2.0
"""An encoder that is not vLLM, in one process, and a consumer of its outputs in another.

    python examples/numpy_pair.py

The announcement that ``put`` returns is plain JSON: here it goes through a pipe, in a
deployment through a router. bfloat16, which numpy lacks, travels as its raw bits.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np

from ec_connector import Consumer, Producer

FACTORS = {"model": "my-encoder", "weights": "2026-11-30"}
"""What both sides must agree on. A consumer with other weights would be refused."""


def encode() -> None:
    """The encoder's process: put one output, announce it, and serve until told to end."""
    rows = np.random.default_rng(0).standard_normal((256, 1024), dtype=np.float32)
    bfloat16 = (rows.view(np.uint32) >> 16).astype(np.uint16)
    with Producer(factors=FACTORS, pool_size="64MiB") as producer:
        announcement = producer.put("photo-1", bfloat16, "bfloat16")
        print(json.dumps(announcement), flush=True)
        sys.stdin.read()


def main() -> None:
    """Start the encoder, fetch what it announces, and look at it."""
    encoder = subprocess.Popen(
        [sys.executable, __file__, "encode"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert encoder.stdout is not None
    announcement = json.loads(encoder.stdout.readline())
    with Consumer(factors=FACTORS, pool_size="64MiB") as consumer:
        raw = consumer.fetch("photo-1", announcement, timeout=5.0)
    rows = (raw.astype(np.uint32) << 16).view(np.float32)
    print(f"{announcement['dtype']} {rows.shape}, mean {rows.mean():+.4f}")
    encoder.communicate("")  # closes its standard input: it ends
    assert encoder.returncode == 0


if __name__ == "__main__":
    encode() if sys.argv[1:] == ["encode"] else main()
