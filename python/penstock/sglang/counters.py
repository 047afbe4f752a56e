"""What the backend counts, and the log lines about a pool that does not answer."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from penstock.errors import PenstockError

logger = logging.getLogger("sglang.penstock")

COUNTERS = {
    "lookup_pages": "Pages asked for in look-ups.",
    "lookup_hit_pages": "Pages that look-ups found, in prefixes that can be restored.",
    "loaded_pages": "Pages loaded and verified.",
    "loaded_bytes": "Bytes of pages loaded and verified.",
    "missed_pages": "Pages that a load did not get.",
    "rejected_objects": "Values from the pool that failed verification.",
    "stored_pages": "Pages stored.",
    "stored_bytes": "Bytes of pages stored.",
    "present_pages": "Pages that were in the pool already when they were to be stored.",
    "unstored_pages": "Pages that were not stored: the pool was full, slow or away.",
    "failures": "Operations that failed. The log tells why.",
}
"""Counter → documentation; each appears as ``sglang:penstock_<counter>_total``."""

_QUIET_SECONDS = 60.0


class Counters:
    """Counts of this backend since it was made. Any thread may count."""

    def __init__(self, sink: Callable[[str, int], None] | None = None) -> None:
        """`sink` hears of every count."""
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._sink = sink

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter."""
        if not amount:
            return
        with self._lock:
            self._counts[name] += amount
        if self._sink is not None:
            # Failures are counted too: nothing may come of it that has to be told in turn.
            with contextlib.suppress(Exception):
                self._sink(name, amount)

    def all(self) -> dict[str, int]:
        """All counters."""
        with self._lock:
            return {name: self._counts[name] for name in COUNTERS}


class Troubles:
    """Says in the log what failed. Each kind of failure is said once a minute at most."""

    def __init__(self, counters: Counters, url: str) -> None:
        self._counters = counters
        self._url = url
        self._said: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def report(self, operation: str, error: Exception) -> None:
        """An operation failed, and SGLang goes on without it."""
        self._counters.count("failures")
        kind = error.kind if isinstance(error, PenstockError) else type(error).__name__
        now = time.monotonic()
        with self._lock:
            if now - self._said.get((operation, kind), -_QUIET_SECONDS) < _QUIET_SECONDS:
                return
            self._said[operation, kind] = now
        logger.warning(
            "Penstock: %s failed with the pool %s: %s. SGLang goes on without it; further failures "
            "of this kind are only counted",
            operation,
            self._url,
            error,
            exc_info=None if isinstance(error, PenstockError) else error,
        )
