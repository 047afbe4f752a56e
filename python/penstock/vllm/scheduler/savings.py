"""The worth of loading: seconds of prefill that it saves, and seconds that requests wait for it."""

from __future__ import annotations

import time
from collections import deque

from penstock.vllm.advisor import Advisor
from penstock.vllm.counters import Counters
from penstock.vllm.scheduler.requests import RequestState

_MOST_PENDING = 1_000


class Savings:
    """The savings of one engine, counted for each tenant.

    A load saves the time that computing its tokens would have taken. This time is estimated from
    this engine's own steps of hundreds of tokens. Loads before the first such step are counted once
    that step is known.
    """

    def __init__(self, advisor: Advisor, counters: Counters) -> None:
        self._advisor = advisor
        self._counters = counters
        self._pending: deque[tuple[str, int, int, int]] = deque(maxlen=_MOST_PENDING)

    def begin_wait(self, state: RequestState) -> None:
        """The request could be computed, but waits for its look-up or its load."""
        if state.waits_since is None:
            state.waits_since = time.monotonic()

    def end_wait(self, state: RequestState) -> None:
        """The request waits no more."""
        if state.waits_since is not None:
            waited = time.monotonic() - state.waits_since
            state.waits_since = None
            if state.span is not None:
                state.span.waited += waited
            self._counters.count_for(state.label, "load_wait_seconds", waited)

    def on_loaded(self, state: RequestState, first: int, end: int) -> None:
        """The request's tokens from `first` to `end` were loaded."""
        self._pending.append((state.label, first, end, state.request.num_tokens))
        while self._pending:
            tenant, first, end, prompt = self._pending[0]
            saved = self._advisor.saved_seconds(first, end, prompt)
            if saved is None:
                return
            self._pending.popleft()
            self._counters.count_for(tenant, "prefill_saved_seconds", saved)
