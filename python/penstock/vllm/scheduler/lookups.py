"""Look-ups: ask the pool which blocks of a request it has."""

from __future__ import annotations

import math
import time

from penstock._native import Lookup
from penstock.vllm.scheduler.common import Common
from penstock.vllm.scheduler.requests import Tracked


class Lookups:
    """The look-ups under way. Each is answered within the timeout; a late one counts as a miss."""

    def __init__(self, common: Common) -> None:
        self._common = common
        self._lookup = Lookup(common.store)
        self.latency: float | None = None
        """Seconds that the last look-up took, infinite if it failed; None before the first."""

    def start(self, tracked: Tracked, *, again: bool = False) -> None:
        """Asks for all blocks of the request. Starts no look-up if too many are waiting. With
        `again`, counts nothing but failures: more blocks may be there than at the last look-up."""
        asked = self.ask(tracked.id)
        if asked and not again:
            self._common.counters.count("lookups")
            self._common.counters.count("lookup_blocks", asked)

    def ask(self, name: str) -> int:
        """Asks for all blocks that the catalogue knows by the name of a request. Returns how many;
        none if too many look-ups are waiting. Counts failures only."""
        agreement = self._common.agreement
        asked = self._common.catalogue.ask(
            name,
            self._lookup,
            agreement.namespaces,
            agreement.spans,
            self._common.settings.lookup_timeout,
        )
        self._common.counters.count("lookup_failures", asked is None)
        return asked or 0

    def take_answers(self) -> None:
        """Takes in the answers that have come."""
        found, failed, seconds = self._common.catalogue.take_answers(self._lookup)
        self._common.counters.count("lookup_hit_blocks", found)
        self._common.counters.count("lookup_failures", failed)
        for took in filter(math.isfinite, seconds):
            self._common.counters.observe("lookup_seconds", took)
        if seconds:
            self.latency = seconds[-1]

    def wait_for(self, tracked: Tracked, until: float) -> None:
        """Waits for the answer to the request's look-up, until this time by the monotonic clock.
        Takes in all answers that come."""
        while self.is_under_way(tracked) and (left := until - time.monotonic()) > 0:
            if self._lookup.wait(left):
                self.take_answers()

    def is_under_way(self, tracked: Tracked) -> bool:
        """Whether the request's look-up is not answered yet."""
        return self.is_asked(tracked.id)

    def is_asked(self, name: str) -> bool:
        """The same for what the catalogue knows by the name of a request."""
        return bool(self._common.catalogue.is_asked(name))

    def drop(self, tracked: Tracked) -> None:
        """Nobody waits for the request's look-up any more."""
        self._common.catalogue.drop_lookup(tracked.id, self._lookup)
        tracked.unawaited_from = None

    def begin_anew(self, tracked: Tracked) -> None:
        """The request was preempted: its blocks will be looked up again."""
        self._common.catalogue.pause(tracked.id, self._lookup)

    def shutdown(self) -> None:
        """Ends the threads, and drops unanswered look-ups."""
        self._lookup.shutdown()
