# SPDX-License-Identifier: Apache-2.0
"""Health checks of all servers, for as long as the router runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from ec_connector.proxy.circuit import State
from ec_connector.proxy.instances import Instance, Instances
from ec_connector.proxy.upstream import Upstream

logger = logging.getLogger("vllm.ec_connector.proxy")


AGAIN = 1.0
"""Seconds between health checks of a server that is out."""


async def probe(instances: Instances, upstream: Upstream, interval: float) -> None:
    """Check each server every ``interval`` seconds, or sooner; ends by being cancelled."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(min(interval, AGAIN))
        due = instances.all()
        if time.monotonic() - last < interval:
            due = [one for one in due if one.circuit.state is State.OUT]
        else:
            last = time.monotonic()
        await check(due, upstream)


async def check(servers: Sequence[Instance], upstream: Upstream) -> dict[Instance, bool]:
    """Which of these servers are healthy now; what comes of it is done."""
    answers = await asyncio.gather(*(upstream.healthy(one.url) for one in servers))
    found = dict(zip(servers, answers, strict=True))
    for instance, healthy in found.items():
        _take(instance, healthy)
    return found


def _take(instance: Instance, healthy: bool) -> None:
    if instance.circuit.checked(healthy, time.monotonic()):
        what = "is healthy again" if healthy else "is out: its health check fails"
        logger.warning("%s server %s %s", instance.role, instance.url, what)
