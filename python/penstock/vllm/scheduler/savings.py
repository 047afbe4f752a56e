"""What loading is worth: seconds of prefill that it saves, and seconds that requests wait."""

from __future__ import annotations

import time
from collections import deque

from penstock.vllm.scheduler.common import Common
from penstock.vllm.scheduler.requests import Tracked

_MOST_PENDING = 1_000


class Savings:
    """Of one engine, counted for each tenant.

    A load saves what its tokens would have taken to compute, by what steps of hundreds of tokens
    took in this engine; loads before the first such step are valued with it.
    """

    def __init__(self, common: Common) -> None:
        self._common = common
        self._pending: deque[tuple[str, int, int, int]] = deque(maxlen=_MOST_PENDING)

    def begin_wait(self, tracked: Tracked) -> None:
        """The request could be computed, and waits for its look-up or a load instead."""
        if tracked.waits_since is None:
            tracked.waits_since = time.monotonic()

    def end_wait(self, tracked: Tracked) -> None:
        """The request waits no more."""
        if tracked.waits_since is not None:
            waited = time.monotonic() - tracked.waits_since
            tracked.waits_since = None
            self._common.counters.count_for(tracked.label, "load_wait_seconds", waited)

    def on_loaded(self, tracked: Tracked, first: int, end: int) -> None:
        """The request's tokens from `first` to `end` were loaded."""
        self._pending.append((tracked.label, first, end, tracked.request.num_tokens))
        while self._pending:
            tenant, first, end, prompt = self._pending[0]
            saved = self._common.advisor.saved_seconds(first, end, prompt)
            if saved is None:
                return
            self._pending.popleft()
            self._common.counters.count_for(tenant, "prefill_saved_seconds", saved)
