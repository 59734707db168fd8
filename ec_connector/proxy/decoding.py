# SPDX-License-Identifier: Apache-2.0
"""Has a request answered by a decoder, where there are such after a prefill server."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ec_connector.proxy.counters import Counters
from ec_connector.proxy.headers import RawHeaders
from ec_connector.proxy.instances import Instance, Instances, Role, Target
from ec_connector.proxy.intake import Answering
from ec_connector.proxy.options import Options
from ec_connector.proxy.payload import Payload, parse
from ec_connector.proxy.placement import least_loaded
from ec_connector.proxy.replies import error_answer, send_answer
from ec_connector.proxy.rewrite import Body, kv_decode_body, prefill_body
from ec_connector.proxy.upstream import Upstream, UpstreamError

logger = logging.getLogger("vllm.ec_connector.proxy")

R = TypeVar("R")


@dataclass(frozen=True)
class Version:
    """A request as a decoder may get it.

    ``content``: its JSON object, or its bytes where they are the client's. ``encoded``: it says
    where encodings are. ``replaced``: it has stand-ins for media. ``told``: whose agent knows of
    these encodings; there it goes if it can.
    """

    content: Body | bytearray
    encoded: bool = False
    replaced: bool = False
    told: Target | None = None

    def payload(self) -> Payload:
        if isinstance(self.content, dict):
            return Payload.of(self.content)
        return Payload([self.content])

    def body(self) -> Any:
        """Its JSON object."""
        return self.content if isinstance(self.content, dict) else parse(self.content)


@dataclass(frozen=True)
class Call:
    """One client's request. ``path`` with the query."""

    path: str
    headers: RawHeaders
    request_id: str
    send: Answering

    @property
    def route(self) -> str:
        """The path without the query."""
        return self.path.partition("?")[0]


class Decoders:
    """Sends calls to prefill servers and decoders."""

    def __init__(
        self, instances: Instances, upstream: Upstream, counters: Counters, options: Options
    ) -> None:
        self._instances = instances
        self._upstream = upstream
        self._counters = counters
        self._options = options

    async def answer(self, call: Call, versions: Sequence[Version]) -> int:
        """Answer a call with the first version, and where its encodings may be why that failed,
        with the next. Returns the status that the client got."""
        avoid: Instance | None = None
        for version in versions[:-1]:
            try:
                return await self._once(call, version, avoid)
            except UpstreamError as error:
                if not _blames_encoding(error, version):
                    return await self._give_up(call, error)
                avoid = error.where
                self._counters.retries.labels("with_media").inc()
                logger.warning(
                    "no answer with its encodings, so again with the media: request=%s: %s",
                    call.request_id, error,
                )  # fmt: skip
        try:
            return await self._once(call, versions[-1], avoid)
        except UpstreamError as error:
            return await self._give_up(call, error)

    async def fetch(self, call: Call) -> int:
        """Answer a GET with any decoder's answer."""
        try:
            return await self._somewhere(
                Role.DECODE,
                None,
                lambda target: self._upstream.relay(
                    target, call.path, call.headers, None, call.send
                ),
            )
        except UpstreamError as error:
            return await self._give_up(call, error)

    async def _once(self, call: Call, version: Version, avoid: Instance | None) -> int:
        if self._instances.of(Role.PREFILL):
            reply = await self._prefilled(call, version, avoid)
            version = Version(kv_decode_body(version.body(), reply))
        return await self._somewhere(
            Role.DECODE,
            avoid,
            lambda target: self._upstream.relay(
                target, call.path, call.headers, version.payload(), call.send
            ),
            version.told,
        )

    async def _prefilled(self, call: Call, version: Version, avoid: Instance | None) -> Any:
        payload = Payload.of(prefill_body(call.route, version.body()))
        return await self._somewhere(
            Role.PREFILL,
            avoid,
            lambda target: self._upstream.ask(
                target, call.path, call.headers, payload, self._options.prefill_timeout
            ),
        )

    async def _somewhere(
        self,
        role: Role,
        avoid: Instance | None,
        work: Callable[[Target], Awaitable[R]],
        first: Target | None = None,
    ) -> R:
        """Do it at ``first`` if that serves, else at the server that has least; when that one
        cannot be reached, at one other."""
        # When all are out, one of them may still be the one that answers.
        everyone = [target for one in self._instances.of(role) for target in one.targets]
        targets = self._instances.targets(role, but=avoid) or everyone
        if not targets:
            raise UpstreamError("none", f"there is no {role} server")
        target = first if first is not None and first in targets else least_loaded(targets)
        try:
            return await self._at(target, work)
        except UpstreamError as error:
            others = self._instances.targets(role, but=target.instance)
            if error.outcome != "unreachable" or not others:
                raise
            self._counters.retries.labels("elsewhere").inc()
            logger.warning("not reached, trying another: %s: %s", target.name, error)
            return await self._at(least_loaded(others), work)

    async def _at(self, target: Target, work: Callable[[Target], Awaitable[R]]) -> R:
        circuit = target.instance.circuit
        try:
            with target.carrying():
                done = await work(target)
        except UpstreamError as error:
            error.where = target.instance
            if not error.status or error.status in (502, 503, 504):
                if circuit.failed(time.monotonic()):
                    logger.warning("%s is out: %s", target.instance.url, error)
            elif error.status < 500:
                circuit.worked()
            raise
        circuit.worked()
        return done

    async def _give_up(self, call: Call, error: UpstreamError) -> int:
        where = error.where.url if error.where else "-"
        how = "answer broke off" if error.sent else "no answer"
        logger.warning("%s: request=%s server=%s: %s", how, call.request_id, where, error)
        if error.sent:  # half an answer must not look whole: the server closes what has no end
            return error.sent
        if error.answer is not None:
            return await send_answer(call.send, error.answer)
        if error.outcome == "none":
            headers = [(b"retry-after", b"5")]
            return await send_answer(call.send, error_answer(503, str(error), headers))
        status = 504 if error.outcome == "timeout" else 502
        text = f"no answer from the decoding server: {error}"
        return await send_answer(call.send, error_answer(status, text))


def _blames_encoding(error: UpstreamError, version: Version) -> bool:
    """Whether the same request with its media may fare better.

    vLLM says 500 and no more when an item did not arrive; 400 may mean that this decoder takes
    no stand-ins for media.
    """
    if not version.encoded or error.outcome != "status" or error.sent:
        return False
    return error.status == 500 or (version.replaced and error.status in (400, 422))
