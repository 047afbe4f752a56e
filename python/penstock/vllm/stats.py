"""The connector's counters in vLLM's own metrics: the only file beside the connector that imports
vLLM when it is imported."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from penstock.vllm import compat
from penstock.vllm.counters import COUNTERS


class PenstockStats(KVConnectorStats):  # type: ignore[misc]
    """Increments of counters since the last report."""

    data: dict[str, int]

    def reset(self) -> None:
        """Forgets everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> PenstockStats:
        """Adds another rank's increments."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line shows."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class PenstockPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same counters for Prometheus, one series an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: compat.metric_per_engine(
                self._counter_cls(
                    name=f"vllm:penstock_{name}",
                    documentation=documentation,
                    labelnames=labelnames,
                ),
                per_engine_labelvalues,
            )
            for name, documentation in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds increments to the engine's series."""
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(amount)
