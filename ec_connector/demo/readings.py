# SPDX-License-Identifier: Apache-2.0
"""What servers say about themselves: their metrics, and what their encoders did."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from ec_connector.demo.probe import EXTENSION

COUNTING_ENV = {"VLLM_SERVER_DEV_MODE": "1"}
COUNTING_OPTIONS = ("--worker-extension-cls", EXTENSION)
"""What a vLLM server needs so that :func:`encoded_pictures` can ask it."""

SETTLE_SECONDS = 3.0

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? ([0-9.eE+-]+)$", re.MULTILINE)


def metrics(url: str) -> dict[str, float]:
    """Every metric of a server by name, added up over its labels. Raises OSError."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    values: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        values[name] = values.get(name, 0.0) + float(value)
    return values


def settled_metrics(url: str, *, wanted: str = "", above: float = 0.0) -> dict[str, float]:
    """The metrics once they stand still, and ``wanted``, if given, exceeds ``above``.

    Servers publish a step's numbers a moment after its tokens. Waits for at
    most ``SETTLE_SECONDS``; the caller finds out what is still missing then.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    before = _counts(metrics(url))
    while True:
        time.sleep(0.05)
        now = metrics(url)
        arrived = not wanted or now.get(wanted, 0.0) > above
        if (arrived and _counts(now) == before) or time.monotonic() > deadline:
            return now
        before = _counts(now)


def growth(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    """By how much a metric grew; one that is not there counts as 0."""
    return after.get(name, 0.0) - before.get(name, 0.0)


def encoded_pictures(url: str) -> int:
    """Pictures that a server's encoder has encoded since this was first asked. Raises OSError."""
    # Every rank of an engine encodes the same; the first speaks for all.
    return int(rpc(url, "encoded_pictures")[0]["pictures"])


def rpc(url: str, method: str, **kwargs: Any) -> list[Any]:
    """Call a method of a server's workers; what each rank returns. Raises OSError."""
    request = urllib.request.Request(
        f"{url}/collective_rpc",
        json.dumps({"method": method, "kwargs": kwargs}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        found: list[Any] = json.load(answer)["results"]
    return found


def _counts(values: Mapping[str, float]) -> dict[str, float]:
    # Asking changes the process' and the HTTP server's own numbers.
    return {name: value for name, value in values.items() if name.startswith(("vllm:", "ec_"))}
