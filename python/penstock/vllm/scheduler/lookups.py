"""Look-ups: ask the pool which blocks of a request it has.

Nobody knows what a look-up takes before the first was answered, nor after one that was not. Then
one look-up at a time may take much longer than requests wait for it. Its answer tells how long that
is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from penstock._native import Catalogue, Lookup, Store
from penstock.vllm.agreement import Agreement
from penstock.vllm.counters import Counters
from penstock.vllm.lookup_limit import FIRST, LONGEST, LookupLimit
from penstock.vllm.scheduler.requests import RequestState


class Lookups:
    """The look-ups under way. Each is answered in bounded time; a late one counts as a miss."""

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        agreement: Agreement,
        limit: LookupLimit,
        counters: Counters,
    ) -> None:
        self._lookup = Lookup(store)
        self._catalogue = catalogue
        self._agreement = agreement
        self._limit = limit
        self._counters = counters
        self.latency: float | None = None
        """Seconds that the last look-up took, infinite if it failed; None before the first."""
        self._measuring: str | None = None
        """The request whose look-up may take longer; None if there is none, or if it is gone."""
        self._measured_by = -math.inf
        """When such a look-up has been answered for certain, by the monotonic clock."""

    def start(self, state: RequestState, *, again: bool = False) -> None:
        """Asks for all blocks of the request. Starts no look-up if too many are waiting. With
        `again`, counts nothing but failures: more blocks may be there than at the last look-up."""
        now = time.monotonic()
        state.asked_at, timeout = now, None
        if self._measures(now):
            self._measuring, self._measured_by = state.id, now + LONGEST
            timeout = LONGEST
        asked = self.ask(state.id, timeout)
        if asked and not again:
            self._counters.count("lookups")
            self._counters.count("lookup_blocks", asked)

    def _measures(self, now: float) -> bool:
        """Whether the look-up that begins now is to tell how long look-ups take."""
        is_known = self.latency is not None and math.isfinite(self.latency)
        if self._limit.is_fixed or is_known:
            return False
        is_over = self._measuring is not None and not self.is_asked(self._measuring)
        return is_over or now >= self._measured_by

    def ask(self, name: str, timeout: float | None = None) -> int:
        """Asks for all blocks that the catalogue knows by the name of a request. Returns how many;
        none if too many look-ups are waiting. Counts failures only. The pool has `timeout` seconds
        to answer, else as long as requests wait."""
        asked = self._catalogue.ask(
            name,
            self._lookup,
            self._agreement.pool_groups,
            self._limit.seconds if timeout is None else timeout,
        )
        self._counters.count("lookup_failures", asked is None)
        return asked or 0

    def take_answers(self) -> None:
        """Takes in the answers that have come."""
        answers = self._catalogue.take_answers(self._lookup)
        self._counters.count("lookup_hit_blocks", answers.found)
        self._counters.count("lookup_failures", answers.failed)
        seconds = answers.seconds
        for took in filter(math.isfinite, seconds):
            self._counters.observe("lookup_seconds", took)
            if self._limit.note(took):
                self._counters.count("lookup_limit_raises")
        if seconds:
            self.latency = seconds[-1]

    def is_late(self, state: RequestState, saves: Callable[[], float | None]) -> bool:
        """Whether the request has waited long enough for its look-up. Beyond the first limit it
        waits only as long as its load would save: `saves` tells how many seconds that is, None if
        nobody knows."""
        waited, limit = time.monotonic() - state.asked_at, self._limit
        if limit.is_fixed or waited <= FIRST:
            return False
        if waited > limit.seconds:
            self.latency = math.inf
            return True
        seconds = saves()
        return seconds is None or waited > seconds

    def wait_for(self, state: RequestState, until: float) -> None:
        """Waits for the answer to the request's look-up, until this time by the monotonic clock.
        Takes in all answers that come."""
        while self.is_under_way(state) and (left := until - time.monotonic()) > 0:
            if self._lookup.wait(left):
                self.take_answers()

    def is_under_way(self, state: RequestState) -> bool:
        """Whether the request's look-up is not answered yet."""
        return self.is_asked(state.id)

    def is_asked(self, name: str) -> bool:
        """Whether a look-up under this request's name is not answered yet, as far as the catalogue
        knows."""
        return bool(self._catalogue.is_asked(name))

    def drop(self, state: RequestState) -> None:
        """Nobody waits for the request's look-up any more, and the catalogue forgets it next."""
        if state.id == self._measuring:
            # It goes on: what it takes is not known yet.
            self._measuring = None
        else:
            self._catalogue.drop_lookup(state.id, self._lookup)
        state.unawaited_from = None

    def begin_anew(self, state: RequestState) -> None:
        """The request was preempted: its blocks will be looked up again."""
        self._catalogue.pause(state.id, self._lookup)

    def shutdown(self) -> None:
        """Ends the threads, and drops unanswered look-ups."""
        self._lookup.shutdown()
