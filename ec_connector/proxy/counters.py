# SPDX-License-Identifier: Apache-2.0
"""What the router counts, for ``GET /metrics``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

ENCODE_OUTCOMES = (
    "ok", "empty", "none", "unreachable", "broke_off", "timeout", "status", "bad_reply"
)  # fmt: skip
"""How an encoding can end. After all but ``ok`` another encoder or the decoder has to do it."""


class Counters:
    """The router's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "ec_proxy_requests",
            "Chat requests answered, by the status that the client got",
            ["kind", "status"],
            registry=self._registry,
        )
        self.encodes = Counter(
            "ec_proxy_encodes",
            "Requests sent to an encoder, by outcome; none: no encoder was there to ask",
            ["outcome"],
            registry=self._registry,
        )
        for outcome in ENCODE_OUTCOMES:  # so that a rate over any of them starts at 0
            self.encodes.labels(outcome)
        self.encode_seconds = Histogram(
            "ec_proxy_encode_seconds",
            "Time until an encoder answered, or was given up",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=self._registry,
        )
        self.items = Counter(
            "ec_proxy_items", "Media items in chat requests", registry=self._registry
        )
        self.items_announced = Counter(
            "ec_proxy_items_announced",
            "Media items that an encoder announced with an address",
            registry=self._registry,
        )
        self.items_replaced = Counter(
            "ec_proxy_items_replaced",
            "Media items sent to a decoder as metadata only",
            registry=self._registry,
        )
        self.retries = Counter(
            "ec_proxy_decode_retries",
            "Requests sent to a decoder once more: elsewhere (it was not reached), or with_media "
            "(it answered with an error that an encoding may be the cause of)",
            ["kind"],
            registry=self._registry,
        )
        for kind in ("elsewhere", "with_media"):
            self.retries.labels(kind)
        self.disconnects = Counter(
            "ec_proxy_client_disconnects",
            "Requests cancelled because the client went away",
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "ec_proxy_requests_in_flight", "Chat requests being handled", registry=self._registry
        )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
