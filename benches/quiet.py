"""Waiting until the machine has nothing to do, so that one row's afterwork is not another's."""

from __future__ import annotations

import time
from pathlib import Path

WINDOW = 0.15
"""Seconds over which the CPUs are watched."""
BUSY = 0.25
"""Cores at work, in sum, that count as quiet."""


def wait(timeout: float = 10.0, at_least: float = 0.2) -> bool:
    """Waits `at_least` seconds, then until the CPUs are quiet; False if they were not in time."""
    time.sleep(at_least)
    end = time.monotonic() + timeout
    while busy_cores() > BUSY:
        if time.monotonic() > end:
            return False
    return True


def busy_cores(window: float = WINDOW) -> float:
    """How many cores were at work over the window."""
    before, began = _busy_seconds(), time.monotonic()
    time.sleep(window)
    return (_busy_seconds() - before) / (time.monotonic() - began)


def _busy_seconds() -> float:
    # user, nice, system, idle, iowait, irq, softirq, in hundredths of a second
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    return (sum(fields) - fields[3] - fields[4]) / 100
