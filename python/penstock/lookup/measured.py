"""What the server measures of itself, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.lookup.service import Service

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0, 5.0)


class Measured:
    """Counters of one server, in a registry of its own."""

    def __init__(self, service: Service) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self._registry = CollectorRegistry()
        self._requests = Counter(
            "penstock_lookup_requests",
            "Look-ups, by HTTP status",
            ["status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "penstock_lookup_seconds",
            "Time from a look-up's head to its answer",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._asked = Counter(
            "penstock_lookup_pool_questions",
            "Look-ups for which a pool was asked, as an index did not know enough",
            registry=self._registry,
        )
        self._failures = Counter(
            "penstock_lookup_pool_failures",
            "Questions that a pool did not answer",
            ["pool", "kind"],
            registry=self._registry,
        )
        self._registry.register(_indexes(service))

    def note(self, status: int, seconds: float) -> None:
        """A look-up was answered."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def note_asked(self) -> None:
        """A pool is asked."""
        self._asked.inc()

    def note_failure(self, pool: str, kind: str) -> None:
        """A pool did not answer."""
        self._failures.labels(pool, kind).inc()

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._registry))


def _indexes(service: Service) -> Collector:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    class Indexes(Collector):
        """What the indexes say when they are asked."""

        def collect(self) -> Iterator[Metric]:
            size = GaugeMetricFamily(
                "penstock_lookup_index_blocks",
                "Blocks that the index of a pool has an answer for",
                labels=["pool"],
            )
            asked = CounterMetricFamily(
                "penstock_lookup_pool_blocks",
                "Blocks that a pool was asked for",
                labels=["pool"],
            )
            for url, blocks, questions in service.stats():
                size.add_metric([url], blocks)
                asked.add_metric([url], questions)
            yield size
            yield asked
            if service.engines:
                yield from _engines(service)
            yield GaugeMetricFamily(
                "penstock_lookup_models", "Models that can be asked for", len(service.models)
            )
            yield GaugeMetricFamily(
                "penstock_lookup_refused_models",
                "Models that pools describe and that cannot be asked for",
                len(service.refused),
            )
            yield from _threads(service)

    return Indexes()


def _threads(service: Service) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    failures = CounterMetricFamily(
        "penstock_lookup_thread_failures",
        "How often the work of a thread failed and had to begin again",
        labels=["thread"],
    )
    failing = GaugeMetricFamily(
        "penstock_lookup_thread_failing",
        "1 for a thread whose work has failed and has made no progress since",
        labels=["thread"],
    )
    for state in service.threads:
        failures.add_metric([state.name], state.failures)
        failing.add_metric([state.name], float(state.is_failing))
    yield failures
    yield failing


def _engines(service: Service) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    known = GaugeMetricFamily(
        "penstock_lookup_engine_blocks",
        "Blocks that an engine is known to have in its own cache",
        labels=["engine"],
    )
    heard = GaugeMetricFamily(
        "penstock_lookup_engine_state",
        "1 for what is known of an engine: complete, partial or gone",
        labels=["engine", "state"],
    )
    lost = CounterMetricFamily(
        "penstock_lookup_engine_losses",
        "How often events of an engine were lost for good",
        labels=["engine"],
    )
    for view in service.engines:
        name = view.address.name
        known.add_metric([name], view.blocks)
        heard.add_metric([name, view.state.name], 1)
        lost.add_metric([name], view.lost)
    yield known
    yield heard
    yield lost
