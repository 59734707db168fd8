# SPDX-License-Identifier: Apache-2.0
"""Health checks of all servers, for as long as the router runs."""

from __future__ import annotations

import asyncio
import logging
import time

from ec_connector.proxy.instances import Instance, Instances
from ec_connector.proxy.upstream import Upstream

logger = logging.getLogger("vllm.ec_connector.proxy")


async def probe(instances: Instances, upstream: Upstream, interval: float) -> None:
    """Check each server every ``interval`` seconds; ends by being cancelled."""
    while True:
        await asyncio.sleep(interval)
        await asyncio.gather(*(_check(one, upstream) for one in instances.all()))


async def _check(instance: Instance, upstream: Upstream) -> None:
    healthy = await upstream.healthy(instance.url)
    if instance.circuit.checked(healthy, time.monotonic()):
        what = "is healthy again" if healthy else "is out: its health check fails"
        logger.warning("%s server %s %s", instance.role, instance.url, what)
