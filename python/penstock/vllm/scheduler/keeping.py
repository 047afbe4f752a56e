"""Keeping: what becomes of a request's blocks in the pool when the request is over.

They are touched until their time is over, or removed, as the request's hints say.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from penstock._native import Catalogue, Keeper, Store
from penstock.vllm.agreement import Agreement
from penstock.vllm.counters import Counters
from penstock.vllm.names import PREFIX
from penstock.vllm.scheduler.hashes import hand_over
from penstock.vllm.scheduler.refusals import UnusableHintError
from penstock.vllm.scheduler.requests import NO_HINTS, RequestState
from penstock.vllm.settings import Settings

_TOUCHES_EVERY = 1.0
"""Seconds between two touches of a kept block. A pool that gives all its room to others in less
time keeps nothing."""
_ASSUMED_BYTES = 16 << 30
"""The size of a pool that does not tell it."""
_MORE_THAN_ANY = 1 << 40
"""More tokens than any request has."""

_COUNTED = {
    "touched": "touched_blocks",
    "refused": "keep_refused_blocks",
    "removed": "let_go_blocks",
    "failed": "keeper_failures",
}
"""What the keeper counts, and the counter."""


class Keeping:
    """The blocks that one engine keeps in the pool, or lets go of, for requests' hints."""

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue,
        agreement: Agreement,
        store: Store,
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._agreement = agreement
        self._store = store
        self._counters = counters
        self._keeper: Keeper | None = None
        """Made for the first hint that needs it."""
        self._counted: Counter[str] = Counter()
        """What the keeper had counted at the last look."""

    def keep(self, state: RequestState, seconds: Any) -> None:
        """The request's blocks will be asked for again, for so many seconds.

        Raises:
            UnusableHintError: that is no such number, or this engine keeps nothing.
        """
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 < seconds < math.inf:
            raise UnusableHintError("not a number of seconds over 0")
        if not self._settings.keep_share:
            raise UnusableHintError(f"{PREFIX}keep_share is 0: this engine keeps nothing")
        self._counters.count("keep_hints")
        limit = self._settings.keep_limit
        state.hints = replace(state.hints, keep=float(min(seconds, limit)))

    def let_go(self, state: RequestState, tokens: Any) -> None:
        """What follows so many tokens of the request will not be asked for again.

        Raises:
            UnusableHintError: that is no such number, or another engine goes on with the request.
        """
        if not isinstance(tokens, int) or tokens < 0:
            raise UnusableHintError("not a number of tokens, nor true")
        if state.is_handed_over:
            raise UnusableHintError("another engine goes on with the request")
        self._counters.count("let_go_hints")
        first = 0 if tokens is True else min(tokens, _MORE_THAN_ANY)
        state.hints = replace(state.hints, let_go=first)
        self._catalogue.limit_stores(state.id, first)

    def on_finished(self, state: RequestState) -> None:
        """The request is over. Its blocks are let go, or kept from now on."""
        hints = state.hints
        if hints is NO_HINTS:
            return
        request, catalogue = state.request, self._catalogue
        hand_over(catalogue, state)
        if state.is_private:
            return
        end = request.num_computed_tokens
        if hints.let_go is not None:
            end = min(end, hints.let_go)
            catalogue.let_go(state.id, self.keeper, hints.let_go)
        if hints.keep is not None:
            end = end // catalogue.alignment * catalogue.alignment
            catalogue.keep(
                state.id,
                self.keeper,
                end=end,
                account=state.account,
                seconds=hints.keep,
            )

    @property
    def keeper(self) -> Keeper:
        """The thread that touches and removes blocks. Starts it."""
        if self._keeper is None:
            settings = self._settings
            self._keeper = Keeper(
                self._store,
                self._agreement.pool_groups,
                share=settings.keep_share,
                account_share=settings.keep_share_of_one,
                assumed_bytes=_ASSUMED_BYTES,
                every=_TOUCHES_EVERY,
            )
        return self._keeper

    def count(self) -> None:
        """Counts what the keeper has done since the last call."""
        if self._keeper is None:
            return
        stats = self._keeper.stats()
        for name, counter in _COUNTED.items():
            self._counters.count(counter, stats[name] - self._counted[name])
        self._counted = Counter(stats)

    def shutdown(self) -> None:
        """Ends the thread. Nothing is kept any more."""
        if self._keeper is not None:
            self._keeper.shutdown()
