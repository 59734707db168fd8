# SPDX-License-Identifier: Apache-2.0
"""What saving and loading one item costs a worker, beside the same copy with torch alone.

    python bench/save_load.py [--json]

On the CPU; needs torch. Medians in microseconds, the three subjects in turn: ours copies
between a tensor and the pool's memory, torch between that tensor and another one that was
there before. A load makes its tensor anew, as vLLM keeps it, so its baseline does too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from ec_connector.engine.device import HostDevice
from ec_connector.pool.region import Region

WIDTH, BLOCK = 4096, 64 * 1024
ROWS = (16, 128, 576, 5760)
ROUNDS = 40


def measure(rows: int) -> dict[str, float]:
    """Medians (microseconds) for an item of so many rows of bfloat16."""
    tensor = torch.ones((rows, WIDTH), dtype=torch.bfloat16)
    nbytes = tensor.numel() * tensor.element_size()
    region = Region.create(nbytes + BLOCK, BLOCK)
    pieces = region.views([(0, -(-nbytes // BLOCK))], nbytes)
    device, beside = HostDevice(), torch.zeros_like(tensor)
    subjects: dict[str, Callable[[], object]] = {
        "save": lambda: device.save(tensor, pieces),
        "torch copy_": lambda: beside.copy_(tensor),
        "load": lambda: device.load(pieces, tensor.shape, tensor.dtype),
        "torch clone": beside.clone,
    }
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(ROUNDS + 3):
        for name, copy in subjects.items():
            begun = time.perf_counter()
            copy()
            if number >= 3:
                times[name].append(time.perf_counter() - begun)
    for piece in pieces:
        piece.release()
    region.close()
    return {name: round(1e6 * statistics.median(taken), 1) for name, taken in times.items()}


def main() -> None:
    """Print a line a size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the worker's copies run
    found = {f"{rows * WIDTH * 2 / 1e6:.2f} MB": measure(rows) for rows in ROWS}
    if options.json:
        print(json.dumps(found))
        return
    for size, times in found.items():
        print(f"{size:>9}", *(f"{name} {value:.1f} us" for name, value in times.items()), sep="  ")


if __name__ == "__main__":
    main()
