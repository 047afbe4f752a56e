"""Counters of the connector, in vLLM's own metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from penstock.vllm import compat

COUNTERS = {
    "lookups": "Requests looked up in the pool.",
    "lookup_blocks": "Blocks asked for in look-ups.",
    "lookup_hit_blocks": "Blocks that look-ups found.",
    "lookup_failures": "Look-ups that ended by a deadline or an error.",
    "lookups_not_awaited": "Requests computed before their look-up was answered: a load was not "
    "expected to pay for the wait.",
    "loads": "Loads started, once for each rank.",
    "loaded_tokens": "Tokens whose KV was loaded and verified.",
    "loaded_bytes": "Bytes of KV loaded and verified, over all ranks.",
    "kept_bytes": "Bytes of KV loaded from host memory, over all ranks.",
    "declined_tokens": "Tokens that were recomputed since loading them seemed slower.",
    "prefetches": "Waiting requests whose blocks were fetched into host memory.",
    "prefetched_bytes": "Bytes of KV fetched into host memory ahead of a load, over all ranks.",
    "probes": "Fetches that only measured the pool.",
    "load_failed_blocks": "Blocks that a load did not get; they were recomputed.",
    "rejected_objects": "Values from the pool that failed verification.",
    "foreign_objects": "Values encrypted with a key that this engine does not have; not loaded.",
    "stored_bytes": "Bytes of KV stored, over all ranks.",
    "stored_blocks": "Blocks that every rank has put into the pool or found there.",
    "stores_dropped": "Objects not stored because room or the pool was missing.",
    "stores_failed": "Objects whose store failed.",
    "unpinned_bytes": "Bytes of host memory that could not be pinned for the GPU: their copies are "
    "slower.",
}
"""Counter → documentation; each appears as ``vllm:penstock_<counter>_total``."""


class PenstockStats(KVConnectorStats):  # type: ignore[misc]
    """Increments of :data:`COUNTERS` since the last report."""

    data: dict[str, int]

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter."""
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def reset(self) -> None:
        """Forgets everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> PenstockStats:
        """Adds another rank's increments."""
        for name, amount in other.data.items():
            self.count(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line shows."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def take(self) -> PenstockStats | None:
        """Hands over what was counted and starts anew; None if that is nothing."""
        if self.is_empty():
            return None
        taken = PenstockStats(data=self.data)
        self.data = {}
        return taken


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
