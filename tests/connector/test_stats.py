"""What the connector counts, as Prometheus gets to see it."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.vllm.counters import COUNTERS, HISTOGRAMS, MOST_TENANTS, Counters
from penstock.vllm.stats import PenstockPromMetrics, PenstockStats


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> PenstockPromMetrics:
    types: dict[Any, Any] = {
        kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    config = SimpleNamespace(kv_transfer_config=None)
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    return PenstockPromMetrics(config, types, ["model_name", "engine"], labels)


def counted(*steps: Counters) -> dict[str, Any]:
    stats = PenstockStats(data={})
    for step in steps:
        stats = stats.aggregate(PenstockStats(data=step.take() or {}))
    return stats.data


def test_ranks_and_steps_add_up(metrics: PenstockPromMetrics, registry: CollectorRegistry) -> None:
    one, other = Counters(), Counters()
    one.count("loaded_bytes", 5)
    other.count("loaded_bytes", 7)
    one.observe("load_seconds", 0.003, "pool")
    other.observe("load_seconds", 0.3, "pool")
    other.observe("load_seconds", 0.0001, "host")
    other.count_for("red", "prefill_saved_seconds", 1.5)
    metrics.observe(counted(one, other), 1)

    def value(name: str, **labels: str) -> float | None:
        labels = {"model_name": "m", "engine": "1"} | labels
        return registry.get_sample_value(f"vllm:penstock_{name}", labels)

    assert value("loaded_bytes_total") == 12
    assert value("loaded_bytes_total", engine="0") == 0
    assert value("load_seconds_count", tier="pool") == 2
    assert value("load_seconds_bucket", tier="pool", le="0.005") == 1
    assert value("load_seconds_count", tier="host") == 1
    assert value("prefill_saved_seconds_total", tenant="red") == 1.5


def test_every_metric_is_there_with_its_documentation(
    metrics: PenstockPromMetrics, registry: CollectorRegistry
) -> None:
    found = {metric.name: metric.documentation for metric in registry.collect()}
    for name, documentation in (COUNTERS | HISTOGRAMS).items():
        assert found[f"vllm:penstock_{name}"] == documentation


def test_the_log_line_shows_means() -> None:
    counters = Counters()
    counters.observe("lookup_seconds", 0.1)
    counters.observe("lookup_seconds", 0.2)
    counters.count("lookups", 2)
    shown = PenstockStats(data=counted(counters)).reduce()
    assert shown == {"lookup_seconds": 0.15, "lookups": 2}


def test_tenants_beyond_a_bound_share_a_series() -> None:
    counters = Counters()
    for number in range(MOST_TENANTS + 5):
        counters.count_for(f"t{number}", "load_wait_seconds", 1.0)
    counters.count_for("t0", "load_wait_seconds", 1.0)
    taken = counters.take()
    assert taken is not None
    assert len(taken) == MOST_TENANTS + 1
    assert taken["load_wait_seconds/others"] == 5
    assert taken["load_wait_seconds/t0"] == 2
