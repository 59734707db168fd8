# SPDX-License-Identifier: Apache-2.0
"""What the router counts, for ``GET /metrics``: named and labelled as vLLM's own metrics are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ec_connector.proxy.budget import Budget
from ec_connector.proxy.circuit import State
from ec_connector.proxy.instances import Instances

PREFIX: Final = "vllm:ec_proxy_"

ENCODE_OUTCOMES = (
    "ok", "empty", "none", "unreachable", "broke_off", "timeout", "status", "bad_reply"
)  # fmt: skip
"""How an encoding can end. After all but ``ok`` another encoder or the decoder has to do it."""

_ENCODE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Counters:
    """The router's metrics, in a registry of their own."""

    def __init__(self, instances: Instances, budget: Budget) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Requests answered, by the status that the client got", "kind", "status"
        )
        self.encodes = self._counter(
            "encodes", "Requests to encoders, by outcome; none: no encoder was there", "outcome"
        )
        for outcome in ENCODE_OUTCOMES:  # so that a rate over any of them starts at 0
            self.encodes.labels(outcome)
        self.retries = self._counter(
            "decode_retries",
            "Requests sent once more: elsewhere (the server was not reached), or with_media (it "
            "answered with an error that an encoding may be the cause of)",
            "kind",
        )
        for kind in ("elsewhere", "with_media"):
            self.retries.labels(kind)
        self.items = self._counter("items", "Media items in requests")
        self.items_announced = self._counter(
            "items_announced", "Media items that an encoder announced with an address"
        )
        self.items_replaced = self._counter(
            "items_replaced", "Media items sent to a decoder as metadata only"
        )
        self.hints = self._counter(
            "ahead_hints", "Items that a decoder's agent was told to fetch ahead, or not", "outcome"
        )
        for outcome in ("told", "dropped"):
            self.hints.labels(outcome)
        self.disconnects = self._counter(
            "client_disconnects", "Requests cancelled because the client went away"
        )
        self.encode_seconds = self._histogram(
            "encode_time_seconds",
            "Time until an encoder answered, or was given up",
            _ENCODE_SECONDS,
        )
        self.first_byte_seconds = self._histogram(
            "time_to_first_byte_seconds",
            "Time from a request's headers to the beginning of its answer",
            _REQUEST_SECONDS,
        )
        self.request_seconds = self._histogram(
            "request_time_seconds",
            "Time from a request's headers to the end of its answer",
            _REQUEST_SECONDS,
        )
        running = Gauge(
            f"{PREFIX}num_requests_running", "Requests under way", registry=self._registry
        )
        running.set_function(lambda: budget.requests)
        held = Gauge(
            f"{PREFIX}body_bytes", "Bytes of bodies of requests under way", registry=self._registry
        )
        held.set_function(lambda: budget.bytes)
        self._registry.register(_Servers(instances))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)


class _Servers(Collector):
    """How the servers stand, read when asked: they come and go."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "server"]
        up = GaugeMetricFamily(
            f"{PREFIX}server_up", "1: the server gets requests, 0: it is out", labels=labels
        )
        load = GaugeMetricFamily(
            f"{PREFIX}server_load", "Requests (encoder: items) that a server has", labels=labels
        )
        for one in self._instances.all():
            up.add_metric([one.role, one.url], float(one.circuit.state is not State.OUT))
            load.add_metric([one.role, one.url], one.load)
        yield up
        yield load
