"""How long a look-up may take: as the operator says, or as long as this pool's look-ups need.

A pool far away answers no look-up in a quarter of a second, and then nothing is ever loaded from
it. So the limit grows with what look-ups take. It never makes a request wait in vain for long: who
waits beyond the first limit waits no longer than its load would save.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.penstock")

FIRST = 0.25
"""Seconds: the limit of a pool that is not far away, or not known yet."""
LONGEST = 2.0
"""Seconds beyond which the limit never grows by itself."""
TIMES = 4.0
"""The limit is so many times what look-ups take. A look-up that finds no connection has to make
one, which takes two round trips more, and one more with TLS."""

_DECAY = 0.9
"""A slow look-up counts so much less with each one after it."""


class LookupLimit:
    """The limit of one engine's look-ups. Reads no clock."""

    def __init__(self, fixed: float | None = None) -> None:
        """`fixed` is the operator's limit in seconds; None if the limit follows the pool."""
        self.is_fixed = fixed is not None
        self.seconds = FIRST if fixed is None else fixed
        """A request waits for its look-up no longer."""
        self._slow = 0.0
        """What the slow ones of the latest look-ups took."""
        self._is_told = False

    @property
    def extra(self) -> float:
        """The seconds by which the limit has grown. A load may take as much longer."""
        return 0.0 if self.is_fixed else self.seconds - FIRST

    def note(self, took: float) -> bool:
        """The pool has answered a look-up in so many seconds. Returns whether the limit has
        grown."""
        if self.is_fixed:
            return False
        self._slow = max(took, _DECAY * self._slow)
        before, self.seconds = self.seconds, needed(self._slow)
        if self.seconds > FIRST and not self._is_told:
            self._is_told = True
            logger.warning(
                "Penstock: a look-up in the pool took %.2f s, so look-ups may take %.2f s from now "
                "on (%.0f s at most). Bring the pool nearer, or set penstock.lookup_timeout",
                took,
                self.seconds,
                LONGEST,
            )
        return self.seconds > before


def needed(took: float) -> float:
    """The limit in seconds for look-ups that take so many seconds.

    >>> needed(0.01), needed(0.1), needed(3.0)
    (0.25, 0.4, 2.0)
    """
    return min(LONGEST, max(FIRST, TIMES * took))
