"""Waits for look-ups: whether a request waits for the answer, or is computed without it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from penstock._native import Catalogue
from penstock.vllm.advisor import ALWAYS, Advisor
from penstock.vllm.scheduler.lookups import Lookups
from penstock.vllm.scheduler.probing import Probing
from penstock.vllm.scheduler.requests import RequestState
from penstock.vllm.scheduler.savings import Savings

_MOMENT = 0.002
"""Seconds that an engine without work waits for look-ups in a step. Without waiting it would make a
step in vain, which takes some milliseconds. Most look-ups take less."""


class LookupWaits:
    """The waits of requests for their look-ups in the pool."""

    def __init__(
        self,
        catalogue: Catalogue,
        advisor: Advisor,
        lookups: Lookups,
        probing: Probing,
        savings: Savings,
        has_time: Callable[[], bool],
    ) -> None:
        """`has_time` tells whether the engine has nothing to compute."""
        self._catalogue = catalogue
        self._advisor = advisor
        self._lookups = lookups
        self._probing = probing
        self._savings = savings
        self._has_time = has_time
        self._moment_ends: float | None = None
        """When this step waits for look-ups no more, by the monotonic clock; None if it has not
        waited yet."""

    def awaits(self, state: RequestState, first: int, last: int) -> bool:
        """Whether a request that could be computed from the token `first` waits for its look-up.
        `last` is the last token at which its load may end."""
        if not self._lookups.is_under_way(state):
            self._probing.forget(state)
            return False
        if not self._pays(state, first, last):
            self._probing.note_unawaited(state, first)
            return False
        return not self._comes_at_once(state)

    def end_moment(self) -> None:
        """No look-up is waited for any more in this step."""
        self._moment_ends = 0.0

    def end_step(self) -> None:
        """The engine asks no more in this step."""
        self._moment_ends = None

    def _comes_at_once(self, state: RequestState) -> bool:
        """Whether the request's look-up is answered now, or in a moment in which the engine has
        nothing to compute."""
        self._savings.begin_wait(state)
        if self._moment_ends is None:
            latency = self._lookups.latency
            pays = (latency is None or latency <= _MOMENT) and self._has_time()
            self._moment_ends = time.monotonic() + (_MOMENT if pays else 0.0)
        self._lookups.wait_for(state, self._moment_ends)
        return not self._lookups.is_under_way(state)

    def _pays(self, state: RequestState, first: int, last: int) -> bool:
        """Whether waiting for the request's look-up pays."""
        if state.awaits is None:
            state.awaits = self._advisor.awaits_lookup(
                first,
                self._catalogue.whole(state.id, first, last),
                state.request.num_tokens,
                self._lookups.latency,
                state.policy,
            )
        if state.awaits and self._lookups.is_late(state, lambda: self._saves(state, first, last)):
            state.awaits = False
        return state.awaits

    def _saves(self, state: RequestState, first: int, last: int) -> float | None:
        """Seconds that a load of all that is asked for would save, and the look-up may take; None
        if nobody knows. Whoever always loads saves any time."""
        if state.policy == ALWAYS:
            return math.inf
        reach = self._catalogue.whole(state.id, first, last)
        saved = self._advisor.saved_seconds(first, reach.end, state.request.num_tokens)
        return None if saved is None else saved - (self._advisor.load_seconds(reach) or 0.0)
