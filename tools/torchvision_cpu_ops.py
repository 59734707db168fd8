# SPDX-License-Identifier: Apache-2.0
"""Lets PyPI's torchvision (a CUDA build) be imported beside a CPU build of torch.

The native library of that build does not load here, and torchvision's own
registrations then fail because two operators have no schema. vLLM's image
processors use only the Python part, so declaring the two schemas is enough.
``make_env.py`` copies this file into the environment it makes, with a ``.pth``
line that imports it at every start of Python there. It imports nothing until
torchvision is imported.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from typing import Any

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[Any] = []  # a Library un-declares its operators when it is collected


class _BeforeRegistrations:
    """A finder that finds nothing, but acts when the registrations are looked for."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name == "torchvision._meta_registrations" and not _declared:
            declare_missing()
        return None


def declare_missing() -> None:
    """Declare the schemas that torchvision's native library, if it loaded, did not."""
    import torch

    missing = [text for name, text in _SCHEMAS.items() if not hasattr(torch.ops.torchvision, name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for text in missing:
            library.define(text)
        _declared.append(library)


sys.meta_path.insert(0, _BeforeRegistrations)
