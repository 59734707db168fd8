# SPDX-License-Identifier: Apache-2.0
"""What the connector adds to an engine's step: its scheduler hooks, called as vLLM calls them.

No vLLM is needed: requests and the step's output are stand-ins with the
attributes that the hooks read, and the agent is real.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ec_connector.agent.link import EngineLink
from ec_connector.bench.ours import BenchError
from ec_connector.bench.results import StepCell
from ec_connector.bench.stats import summarize
from ec_connector.config import Settings
from ec_connector.engine._compat import EngineFacts
from ec_connector.engine.scheduler import SchedulerSide
from ec_connector.protocol.fingerprint import Identity

ROWS, WIDTH = 64, 1024
_DTYPE = "bfloat16"
_NOBODY = 1  # a port on which nobody listens
_PATIENT = {"pool_size": "64MiB", "fetch_timeout": "300s", "connect_timeout": "300s"}


@dataclass
class _Position:
    offset: int
    length: int = ROWS

    def get_num_embeds(self) -> int:
        return self.length


@dataclass
class _Feature:
    identifier: str
    mm_position: _Position
    data: Any = None
    modality: str = "image"


@dataclass
class _Request:
    request_id: str
    mm_features: list[_Feature]
    ec_transfer_params: dict[str, Any]


@dataclass
class _Output:
    total_num_scheduled_tokens: int = 1
    free_encoder_mm_hashes: list[str] = field(default_factory=list)


class _NoMedia:
    """Every item came as a mere description: its request must wait."""

    def has_media(self, feature: Any) -> bool:  # noqa: ARG002 - as vLLM's side calls it
        return False

    def announcements(self, features: Any) -> dict[str, dict[str, Any]]:  # noqa: ARG002 - as above
        return {}


def steps(waiting: int, images: int, count: int) -> StepCell:
    """Seconds that the hooks take in one step while so many requests wait for so many images.

    Their producer does not answer yet, so every request is looked at in every step.
    """
    requests = [_request(number, images) for number in range(waiting)]
    facts = EngineFacts(
        settings=Settings.parse(_PATIENT),
        identity=Identity(),
        is_producer=False,
        is_consumer=True,
        dtype=_DTYPE,
        possible_widths=frozenset({WIDTH}),
    )
    scheduler = SchedulerSide(facts, EngineLink(facts.settings, facts.identity), _NoMedia())
    try:
        _step(scheduler, [])
        arrival = _step(scheduler, requests)
        time.sleep(0.5)  # what the agent has to do at the arrival
        times = [_step(scheduler, requests) for _ in range(count)]
        if any(scheduler.ensure(request, 0) for request in requests):
            raise BenchError("a request was let through without its images")
    finally:
        scheduler.close()
    return StepCell(waiting=waiting, images=images, times=summarize(times), arrival=arrival)


def _request(number: int, images: int) -> _Request:
    keys = [f"item-{number}-{image}" for image in range(images)]
    entry = {
        "peer_host": "127.0.0.1",
        "peer_port": _NOBODY,
        "size_bytes": ROWS * WIDTH * 2,
        "shape": [ROWS, WIDTH],
        "dtype": _DTYPE,
    }
    features = [_Feature(key, _Position(index * ROWS)) for index, key in enumerate(keys)]
    return _Request(f"request-{number}", features, dict.fromkeys(keys, entry))


def _step(scheduler: SchedulerSide, requests: list[_Request]) -> float:
    begun = time.perf_counter()
    for request in requests:
        scheduler.ensure(request, 0)
    scheduler.build(_Output())
    scheduler.take_unavailable()
    scheduler.stats()
    return time.perf_counter() - begun
