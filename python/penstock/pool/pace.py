"""A bound on how fast work is done: bytes a second, tokens a second."""

from __future__ import annotations

import threading
import time


class Pace:
    """Keeps what several threads do together at a rate. Time that nobody used is not made up for.

    >>> pace = Pace(None)
    >>> pace.spend(1 << 40)
    """

    def __init__(self, rate: float | None) -> None:
        """`rate` is the amount a second; None sets no bound."""
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def spend(self, amount: float) -> None:
        """Notes that `amount` was done, and sleeps until more may be done."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + amount / self._rate
            wait = self._free_at - now
        time.sleep(wait)
