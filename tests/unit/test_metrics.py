# SPDX-License-Identifier: Apache-2.0
"""What is counted reaches vLLM's log line and ``/metrics`` unchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ec_connector.engine.tally import COUNTS, GAUGES, LINKED, REASONED, TIMES, Tally, merge


def filled() -> Tally:
    tally = Tally()
    tally.add("loaded_items", 2)
    tally.add_reason("fallback_items", "deadline")
    tally.add_reason("fallback_items", "deadline")
    tally.observe("fetch_time", 0.004)
    tally.note_agent({}, {"bytes": {"lan consumer payload_in": 100}})
    tally.gauges = {"usage_ratio": 0.5}
    return tally


def test_a_tally_is_handed_over_once() -> None:
    """Delta semantics: what was taken is not taken again."""
    tally = filled()
    assert tally.take() == {
        "counts": {"loaded_items": 2},
        "reasons": {"fallback_items": {"deadline": 2}},
        "times": {"fetch_time": [0.004]},
        "gauges": {"usage_ratio": 0.5},
        "links": {"bytes": {"lan consumer payload_in": 100}},
    }
    assert tally.take() is None
    assert tally.totals == {"fallback_items": {"deadline": 2}}


def test_links_are_counted_once() -> None:
    """An agent says its sums since its start: what was added is counted, a new agent's from 0."""
    tally = Tally()
    for said, counted in ((3, 3), (5, 2), (5, None)):
        tally.note_agent({}, {"transfers": {"lan consumer delivered": said}})
        tally.gauges = {}
        taken = tally.take()
        assert (taken and taken["links"]["transfers"]["lan consumer delivered"]) == counted
    tally.new_agent()
    tally.note_agent({}, {"transfers": {"lan consumer delivered": 4}})
    assert (tally.take() or {})["links"] == {"transfers": {"lan consumer delivered": 4}}


def test_only_a_failure_is_something() -> None:
    """An interval in which everything failed is not an empty one."""
    tally = Tally()
    tally.add_reason("failed_requests", "missing")
    assert tally.take() is not None


def test_observations_are_bounded() -> None:
    """A burst cannot make a message without end."""
    tally = Tally()
    for _ in range(5000):
        tally.observe("fetch_time", 0.1)
    taken = tally.take()
    assert taken is not None
    assert len(taken["times"]["fetch_time"]) == 1024


def test_tallies_add_up() -> None:
    """Counts and reasons are added, observations joined, gauges replaced by the later ones."""
    one, other = filled().take() or {}, filled().take() or {}
    other["gauges"] = {"usage_ratio": 0.75}
    both = merge(one, other)
    assert both["counts"] == {"loaded_items": 4}
    assert both["reasons"] == {"fallback_items": {"deadline": 4}}
    assert both["times"] == {"fetch_time": [0.004, 0.004]}
    assert both["gauges"] == {"usage_ratio": 0.75}
    assert both["links"] == {"bytes": {"lan consumer payload_in": 200}}
    assert merge({}, one) == one


def test_names_say_what_they_count() -> None:
    """Every name ends in its unit, and none is used twice."""
    names = [*COUNTS, *REASONED]
    assert all(name.endswith(("_items", "_bytes", "_requests", "_restarts")) for name in names)
    linked = [name for name, _, _ in LINKED.values()]
    assert linked == ["transfers", "transferred_bytes", "transfer_time_seconds"]
    everything = [*names, *TIMES, *GAUGES, *linked]
    assert len(everything) == len(set(everything))


@pytest.fixture
def metrics() -> Any:
    return pytest.importorskip("ec_connector.engine.metrics", reason="needs vLLM's metric classes")


def test_the_log_line_names_reasons_and_median(metrics: Any) -> None:
    """vLLM's interval line is complete and short."""
    stats = metrics.PoolStats(filled().take()).aggregate(metrics.PoolStats(filled().take()))
    assert not stats.is_empty()
    assert stats.reduce() == {
        "loaded_items": 4,
        "fallback_items[deadline]": 4,
        "fetch_time_median_ms": 4.0,
        "usage_ratio": 0.5,
    }
    stats.reset()
    assert stats.is_empty()


def test_prometheus_gets_every_kind(metrics: Any) -> None:
    """Counters, reasons, times and gauges of each engine stand under their own labels."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry = CollectorRegistry()

    def within(kind: type) -> Any:
        return lambda **options: kind(registry=registry, **options)

    prom = metrics.PoolPromMetrics(
        SimpleNamespace(ec_transfer_config=None),
        {kind: within(kind) for kind in (Counter, Gauge, Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    prom.observe(filled().take(), 1)
    prom.observe(filled().take(), 1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", "engine": "1"} | labels)

    assert value("vllm:ec_pool_loaded_items_total") == 4
    assert value("vllm:ec_pool_fallback_items_total", reason="deadline") == 4
    assert value("vllm:ec_pool_fetch_time_seconds_count") == 2
    assert value("vllm:ec_pool_usage_ratio") == 0.5
    where = {"link": "lan", "role": "consumer", "part": "payload_in"}
    assert value("vllm:ec_pool_transferred_bytes_total", **where) == 200
    zero = registry.get_sample_value(
        "vllm:ec_pool_loaded_items_total", {"model_name": "m", "engine": "0"}
    )
    assert zero == 0
    prom.observe({"counts": {"of_a_newer_worker": 1}, "reasons": {"unknown": {"x": 1}}}, 0)
