"""Waits until the machine is idle. So the work that a row leaves behind delays no other row."""

from __future__ import annotations

import time
from pathlib import Path

WINDOW = 0.15
"""Seconds for which the CPUs are watched."""
BUSY = 0.25
"""Up to this many cores at work, in sum, count as quiet."""


def wait(timeout: float = 10.0, at_least: float = 0.2) -> bool:
    """Waits `at_least` seconds, then until the CPUs are quiet. False: they were not in time."""
    time.sleep(at_least)
    end = time.monotonic() + timeout
    while busy_cores() > BUSY:
        if time.monotonic() > end:
            return False
    return True


def busy_cores(window: float = WINDOW) -> float:
    """How many cores are at work, on average over the window."""
    before, began = _busy_seconds(), time.monotonic()
    time.sleep(window)
    return (_busy_seconds() - before) / (time.monotonic() - began)


def _busy_seconds() -> float:
    # user, nice, system, idle, iowait, irq, softirq, in hundredths of a second
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    return (sum(fields) - fields[3] - fields[4]) / 100
