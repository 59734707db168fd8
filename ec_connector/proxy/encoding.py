# SPDX-License-Identifier: Apache-2.0
"""Has a request's media encoded: several encoders at once, each another's stand-in.

An encoder that fails or is slow costs time, never the answer: what it did not encode stays
with the request, and the decoder encodes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ec_connector.proxy.counters import Counters
from ec_connector.proxy.headers import RawHeaders
from ec_connector.proxy.instances import Instances, Role, Target
from ec_connector.proxy.media import CHAT, Item
from ec_connector.proxy.payload import Payload
from ec_connector.proxy.placement import by_key
from ec_connector.proxy.rewrite import Body, encode_body, placed_entries, reply_params
from ec_connector.proxy.upstream import Upstream, UpstreamError

logger = logging.getLogger("vllm.ec_connector.proxy")


@dataclass
class Encoded:
    """What encoders announced.

    ``placed``: identifier and entry of each item that was encoded, by its place among all.
    ``params``: the announcement for the decoder.
    """

    placed: dict[int, tuple[str, Body]] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One request's media.

    ``options``: the body that requests to encoders are made of. ``announced``: told what each
    encoder announced, as soon as it has.
    """

    items: Sequence[Item]
    options: Body
    headers: RawHeaders
    request_id: str
    announced: Callable[[Mapping[str, Any]], None]


class Encoders:
    """Sends jobs to encoders, each for at most ``timeout`` seconds."""

    def __init__(
        self, instances: Instances, upstream: Upstream, counters: Counters, timeout: float
    ) -> None:
        self._instances = instances
        self._upstream = upstream
        self._counters = counters
        self._timeout = timeout

    async def run(self, job: Job) -> Encoded:
        """Have all items of a job encoded; what fails is logged, counted and left out."""
        places: dict[str, list[int]] = {}  # of the same content: it is sent once
        for place, item in enumerate(job.items):
            places.setdefault(item.key, []).append(place)
        targets = self._instances.targets(Role.ENCODE)
        if not targets:
            self._counters.encodes.labels("none").inc()
            logger.warning("no encoder, the decoder gets the media: request=%s", job.request_id)
            return Encoded()
        batches: dict[Target, list[int]] = {}
        with contextlib.ExitStack() as carried:
            for key, same in places.items():
                target = by_key(key, targets)
                carried.enter_context(target.carrying())
                batches.setdefault(target, []).append(same[0])
            announced = await asyncio.gather(
                *(self._batch(job, target, batch) for target, batch in batches.items())
            )
        encoded = Encoded()
        for batch, params in zip(batches.values(), announced, strict=True):
            entries = placed_entries(params, [job.items[place].modality for place in batch])
            if entries is None and len(batch) == len(job.items):
                encoded.params = params  # for whoever can make more of it
            for index, found in (entries or {}).items():
                for place in places[job.items[batch[index]].key]:
                    encoded.placed[place] = found
        for place, (key, entry) in sorted(encoded.placed.items()):
            known = encoded.params.setdefault(key, {**entry, "item_indices": []})
            known["item_indices"].append(place)
        return encoded

    async def _batch(self, job: Job, target: Target, batch: Sequence[int]) -> dict[str, Any]:
        """What is announced for these items: by this encoder, or else by one other."""
        failed: list[tuple[Target, UpstreamError]] = []
        params: dict[str, Any] = {}
        while True:
            try:
                params = await self._ask(job, target, batch)
                target.instance.circuit.worked()
                job.announced(params)
            except UpstreamError as error:
                failed.append((target, error))
                others = self._instances.targets(Role.ENCODE, but=target.instance)
                if len(failed) == 1 and others and not _is_refusal(error):
                    target = by_key(job.items[batch[0]].key, others)
                    continue
            break
        self._judge(failed)
        return params

    async def _ask(self, job: Job, target: Target, batch: Sequence[int]) -> dict[str, Any]:
        body = encode_body(job.options, [job.items[place].part for place in batch])
        started = time.monotonic()
        outcome = "cancelled"
        try:
            reply = await self._upstream.ask(
                target, CHAT, job.headers, Payload.of(body), self._timeout
            )
            try:
                params = reply_params(reply)
            except ValueError as error:
                raise UpstreamError("bad_reply", str(error)) from error
            outcome = "ok" if params else "empty"
        except UpstreamError as error:
            outcome = error.outcome
            self._warn(job, target, outcome, str(error))
            raise
        finally:
            if outcome != "cancelled":
                self._counters.encodes.labels(outcome).inc()
                self._counters.encode_seconds.observe(time.monotonic() - started)
        if not params:
            self._warn(job, target, outcome, "it announces nothing")
        return params

    def _warn(self, job: Job, target: Target, outcome: str, why: str) -> None:
        logger.warning(
            "encoding failed, another encoder or the decoder has to do it: request=%s encoder=%s "
            "reason=%s: %s",
            job.request_id, target.name, outcome, why,
        )  # fmt: skip

    def _judge(self, failed: Sequence[tuple[Target, UpstreamError]]) -> None:
        """Hold failures against the encoders, unless they say that the request is at fault."""
        errors = [error for _, error in failed]
        if len(failed) == 2 and all(error.status >= 500 for error in errors):
            return
        for target, error in failed:
            if _is_refusal(error):
                target.instance.circuit.worked()
            elif target.instance.circuit.failed(time.monotonic()):
                logger.warning("encoder %s is out: %s", target.instance.url, error)


def _is_refusal(error: UpstreamError) -> bool:
    """Whether any other encoder would say the same."""
    return 400 <= error.status < 500 and error.status != 429
