"""The connector's counters and histograms in vLLM's own metrics.

Apart from the connector, only this file imports vLLM when it is imported."""

from __future__ import annotations

import statistics
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from penstock.vllm.counters import (
    BUCKETS,
    COUNTER_LABELS,
    COUNTERS,
    HISTOGRAM_LABELS,
    HISTOGRAMS,
    PLACE_COUNTERS,
    TENANT_COUNTERS,
    Counts,
)


class PenstockStats(KVConnectorStats):  # type: ignore[misc]
    """Increments of counters, and observations, since the last report."""

    data: Counts

    def reset(self) -> None:
        """Forgets everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> PenstockStats:
        """Adds the counts and observations of another rank or of a later step."""
        for key, more in other.data.items():
            before = self.data.get(key)
            self.data[key] = more if before is None else before + more
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values for vLLM's log line. A histogram gives its mean."""
        return {
            key: round(statistics.fmean(value), 6) if isinstance(value, list) else value
            for key, value in self.data.items()
        }

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def label_of(counter: str) -> tuple[str, ...]:
    """A counter's own label, if it has one."""
    return (COUNTER_LABELS[counter],) if counter in COUNTER_LABELS else ()


class PenstockPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters and histograms for Prometheus: one series for each engine and label."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = per_engine_labelvalues
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:penstock_{name}",
                documentation=documentation,
                labelnames=[*labelnames, *label_of(name)],
            )
            for name, documentation in (COUNTERS | TENANT_COUNTERS | PLACE_COUNTERS).items()
        }
        self._histograms = {
            name: self._histogram_cls(
                name=f"vllm:penstock_{name}",
                documentation=documentation,
                labelnames=[*labelnames, *HISTOGRAM_LABELS.get(name, ())[:1]],
                buckets=BUCKETS[name.rpartition("_")[2]],
            )
            for name, documentation in HISTOGRAMS.items()
        }
        # Start at zero, so that rates have a first value.
        for index in per_engine_labelvalues:
            for name, counter in self._counters.items():
                self._series(counter, index, *("" for _ in label_of(name)))
            for name, histogram in self._histograms.items():
                if name not in HISTOGRAM_LABELS:
                    self._series(histogram, index)
                    continue
                for value in HISTOGRAM_LABELS[name][1]:
                    self._series(histogram, index, value)

    def _series(self, metric: Any, engine_idx: int, *label: str) -> Any:
        return metric.labels(*self._labels[engine_idx], *label)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds increments and observations to the engine's series."""
        for key, value in transfer_stats_data.items():
            name, slash, label = key.partition("/")
            labels = (label,) if slash else ()
            if name in self._counters:
                self._series(self._counters[name], engine_idx, *labels).inc(value)
            elif name in self._histograms:
                histogram = self._series(self._histograms[name], engine_idx, *labels)
                for each in value:
                    histogram.observe(each)
