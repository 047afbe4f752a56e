"""The counters in SGLang's own metrics, and the times of transfers as SGLang asks for them."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from penstock.sglang.counters import COUNTERS

_GIB = 1 << 30
_MOST_TRANSFERS = 10_000


class Prometheus:
    """The counters in the process's Prometheus registry, which SGLang's `/metrics` shows."""

    def __init__(self, config: Any) -> None:
        """`config` is SGLang's storage configuration; a rank has series of its own."""
        self._labels = (str(config.tp_rank), str(config.pp_rank), str(config.dp_rank))
        for name in COUNTERS:
            # Start at zero, so that rates have a first value.
            self.count(name, 0)

    def count(self, name: str, amount: int) -> None:
        """Adds to a counter."""
        _series(name).labels(*self._labels).inc(amount)


@cache
def _series(name: str) -> Any:
    # Once in a process: SGLang may detach a backend and attach another.
    from prometheus_client import Counter

    return Counter(
        f"sglang:penstock_{name}",
        COUNTERS[name],
        labelnames=("tp_rank", "pp_rank", "dp_rank"),
    )


class Transfers:
    """Pages and speeds of transfers since SGLang last asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: list[tuple[int, float]] = []
        self._stores: list[tuple[int, float]] = []

    def loaded(self, pages: int, nbytes: int, seconds: float) -> None:
        """Pages were loaded."""
        self._add(self._loads, pages, nbytes, seconds)

    def stored(self, pages: int, nbytes: int, seconds: float) -> None:
        """Pages were stored."""
        self._add(self._stores, pages, nbytes, seconds)

    def _add(
        self, transfers: list[tuple[int, float]], pages: int, nbytes: int, seconds: float
    ) -> None:
        with self._lock:
            if pages and len(transfers) < _MOST_TRANSFERS:
                transfers.append((pages, nbytes / max(seconds, 1e-9) / _GIB))

    def take(self) -> Any:
        """SGLang's `StorageMetrics` of all transfers since the last call; speeds in GiB/s."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            loads, self._loads = self._loads, []
            stores, self._stores = self._stores, []
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in stores],
            prefetch_bandwidth=[speed for _, speed in loads],
            backup_bandwidth=[speed for _, speed in stores],
        )
