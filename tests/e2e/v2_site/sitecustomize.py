# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's second model runner start on a CPU, for tests: on ``PYTHONPATH`` of every process.

That runner needs Triton, and vLLM takes Triton for usable on a CPU when Triton
has a backend called "cpu". With ``TRITON_INTERPRET=1`` the kernels run in
Triton's interpreter, which needs no backend, so an empty one under that name is
enough. Slow, but right.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace


class _BeforeTritonIsJudged:
    """A finder that finds nothing, but acts when vLLM is about to look at Triton."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name == "vllm.triton_utils.importing":
            from triton.backends import backends

            never = SimpleNamespace(is_active=lambda: False)
            backends.setdefault("cpu", SimpleNamespace(compiler=None, driver=never))
        return None


sys.meta_path.insert(0, _BeforeTritonIsJudged)
