# SPDX-License-Identifier: Apache-2.0
"""The tally in vLLM's terms: its periodic log line and its ``/metrics``."""

from __future__ import annotations

from statistics import median
from typing import Any, Final

from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from ec_connector.engine.tally import COUNTS, GAUGES, LINKED, REASONED, TIMES, merge

PREFIX: Final = "vllm:ec_pool_"
_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class PoolStats(ECConnectorStats):
    """What :meth:`ec_connector.engine.tally.Tally.take` returned, as vLLM passes it on."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> PoolStats:
        """This and a later one added up."""
        self.data = merge(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        """Whether nothing happened. Gauges alone are something to export."""
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """The interval in a few numbers, for the log line. Links would make it long."""
        line: dict[str, int | float] = dict(self.data.get("counts", {}))
        for name, reasons in self.data.get("reasons", {}).items():
            for reason, number in reasons.items():
                line[f"{name}[{reason}]"] = number
        for name, seen in self.data.get("times", {}).items():
            if seen:
                line[f"{name}_median_ms"] = round(median(seen) * 1000, 3)
        for name, value in self.data.get("gauges", {}).items():
            line[name] = round(value, 4)
        return line


class PoolPromMetrics(ECConnectorPromMetrics):
    """Prometheus metrics ``vllm:ec_pool_*`` of every engine behind one API server.

    Counters get Prometheus' ``_total``; ``reason``, ``link``, ``role``, ``outcome``, ``part`` and
    ``stage`` are labels with few values.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counts = {
            name: self._per_engine(self._counter_cls, name, text) for name, text in COUNTS.items()
        }
        self._times = {
            name: self._per_engine(
                self._histogram_cls, f"{name}_seconds", text, buckets=list(_SECONDS)
            )
            for name, text in TIMES.items()
        }
        self._gauges = {
            name: self._per_engine(self._gauge_cls, name, text, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        self._reasoned = {
            name: self._counter_cls(
                name=PREFIX + name, documentation=text, labelnames=[*labelnames, "reason"]
            )
            for name, text in REASONED.items()
        }
        self._linked = {
            summed: self._counter_cls(
                name=PREFIX + name,
                documentation=text,
                labelnames=[*labelnames, "link", "role", label],
            )
            for summed, (name, label, text) in LINKED.items()
        }

    def _per_engine(self, kind: Any, name: str, text: str, **options: Any) -> dict[int, Any]:
        metric = kind(
            name=PREFIX + name, documentation=text, labelnames=self._labelnames, **options
        )
        made: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return made

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one engine's tally."""
        for name, number in transfer_stats_data.get("counts", {}).items():
            if name in self._counts:
                self._counts[name][engine_idx].inc(number)
        for name, seen in transfer_stats_data.get("times", {}).items():
            if name in self._times:
                for value in seen:
                    self._times[name][engine_idx].observe(value)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            if name in self._gauges:
                self._gauges[name][engine_idx].set(value)
        labels = self.per_engine_labelvalues[engine_idx]
        for name, reasons in transfer_stats_data.get("reasons", {}).items():
            for reason, number in reasons.items():
                if name in self._reasoned:
                    self._reasoned[name].labels(*labels, reason).inc(number)
        for name, sums in transfer_stats_data.get("links", {}).items():
            for words, number in sums.items():
                if name in self._linked:
                    self._linked[name].labels(*labels, *words.split(" ")).inc(number)
