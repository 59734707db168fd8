# SPDX-License-Identifier: Apache-2.0
"""A runtime in plain numpy for a stage's worker, with ways to go wrong. Needs no test library."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from ec_connector.stage.runtime import Placement, Port


class Plain:
    """What a "file" does is written in it."""

    def version(self):
        return "plain 1"

    def providers(self):
        return ["Plain"]

    def open(self, path, providers):
        what = Path(path).read_text().strip()
        if what == "unloadable":
            raise ValueError("this is no graph")
        return PlainGraph(what)


class PlainGraph:
    """Takes ``x``, two axes of float32, and gives ``double``, ``shape``."""

    def __init__(self, what):
        self.placement = Placement("cpu", "Plain", "there is nothing else")
        self.metadata = {"made": "by hand"}
        self.inputs = [Port("x", "float32", [-1, 4])]
        self.outputs = [Port("double", "float32", [-1, 4]), Port("shape", "int64", [2])]
        self.what = what

    def run(self, arrays, outputs):
        if self.what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.what == "hangs":
            time.sleep(600)
        if self.what == "raises":
            raise ZeroDivisionError("of the runtime's own")
        rows = arrays["x"]
        rows *= 2  # what arrives is writable
        out = {"double": rows, "shape": np.array(rows.shape, np.int64)}
        if self.what == "text":
            out["double"] = np.array(["no", "numbers"])
        if self.what == "much":
            out["double"] = np.zeros((1 << 20, 4), np.float32)
        return {name: out[name] for name in outputs}
