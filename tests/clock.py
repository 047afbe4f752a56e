"""A clock of the test's own, for code that reads the time or sleeps."""

from __future__ import annotations

import threading

import pytest


class Clock:
    """Time that passes only while somebody sleeps, and when the test says so.

    It stands in for the module `time` in the modules that are named.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.now = 100.0
        self._lock = threading.Lock()
        for module in modules:
            monkeypatch.setattr(f"{module}.time", self)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds
