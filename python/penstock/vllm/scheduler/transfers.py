"""Loads and prefetches under way: their bytes, how long they may take and how long they took."""

from __future__ import annotations

import time

from penstock._native import Choice, Moved, Reach
from penstock.vllm.advisor import Advisor
from penstock.vllm.counters import Counters
from penstock.vllm.lookup_limit import LookupLimit
from penstock.vllm.messages import WorkerReport
from penstock.vllm.settings import Settings


class Transfers:
    """The loads and prefetches of one engine. The engine's advisor learns from them."""

    def __init__(
        self, settings: Settings, limit: LookupLimit, advisor: Advisor, counters: Counters
    ) -> None:
        self._settings = settings
        self._limit = limit
        self._advisor = advisor
        self._counters = counters
        self._loads: dict[int, tuple[str, float | None]] = {}
        """Load → the tier that it comes from, and the seconds that it was expected to take."""
        self._ends: dict[int, float] = {}
        """Load → when it was expected to end, by the monotonic clock."""
        self._took: dict[int, tuple[float, int]] = {}
        """Job → seconds that it took and bytes that it did not get, from the ranks' reports so
        far."""

    def begin(
        self,
        number: int,
        moved: Moved,
        choice: Choice | None = None,
        *,
        is_probe: bool = False,
    ) -> tuple[float, float]:
        """The timeout and the pace of a load or prefetch that begins now, see
        :class:`~penstock.vllm.messages.BlockJob`. `choice` is the advice for a load."""
        host_bytes, pool_bytes = moved.host_bytes, moved.pool_bytes
        timeout, pace, patience = (
            self._settings.load_deadline(host_bytes + pool_bytes) + self._limit.extra,
            0.0,
            None,
        )
        if choice is not None:
            self._loads[number] = ("pool" if pool_bytes else "host", choice.load)
            expected = self._advisor.load_seconds(Reach(0, host_bytes, pool_bytes))
            if expected is not None:
                self._ends[number] = time.monotonic() + expected
            patience = self._advisor.patience(choice, host_bytes, pool_bytes, moved.objects)
        if choice is not None and patience is not None:
            timeout, pace = min(timeout, patience), choice.recompute or 0.0
        self._advisor.on_begin(
            time.monotonic(), number, host_bytes, pool_bytes, patience=patience, is_probe=is_probe
        )
        return timeout, pace

    def is_one_to_end(self, now: float, until: float) -> bool:
        """Whether a load is expected to end in this time. One that should have ended is not."""
        return any(now <= end <= until for end in self._ends.values())

    def note(self, report: WorkerReport) -> None:
        """Takes in the ranks' reports of jobs that ended there."""
        for number, seconds in report.seconds.items():
            longest, missing = self._took.get(number, (0.0, 0))
            missing += report.missing_bytes.get(number, 0)
            self._took[number] = max(longest, seconds), missing

    def end(self, number: int) -> float:
        """A load or prefetch has ended on all ranks. Returns the seconds that it took on the
        slowest rank."""
        seconds, missing = self._took.pop(number, (0.0, 0))
        self._advisor.on_end(number, seconds, missing)
        tier, expected = self._loads.pop(number, (None, None))
        self._ends.pop(number, None)
        if tier is not None and not missing:
            self._counters.observe("load_seconds", seconds, tier)
            if expected:
                self._counters.observe("load_to_expected_ratio", seconds / expected)
        return seconds
