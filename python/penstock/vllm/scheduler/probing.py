"""Probing: counts the tokens that are not loaded, and now and then fetches some of their blocks.

Such a fetch serves no request; it measures the pool. If nothing is ever loaded from a pool, nobody
notices when the pool has become faster."""

from __future__ import annotations

import time

from penstock._native import Catalogue
from penstock.vllm.advisor import AUTO, Advisor
from penstock.vllm.agreement import Agreement
from penstock.vllm.counters import Counters
from penstock.vllm.scheduler.lookups import Lookups
from penstock.vllm.scheduler.prefetches import Prefetches
from penstock.vllm.scheduler.requests import Phase, RequestState


class Probing:
    """Counts declined loads, and orders probes in their place."""

    def __init__(
        self,
        catalogue: Catalogue,
        agreement: Agreement,
        advisor: Advisor,
        lookups: Lookups,
        prefetches: Prefetches,
        counters: Counters,
    ) -> None:
        self._catalogue = catalogue
        self._agreement = agreement
        self._advisor = advisor
        self._lookups = lookups
        self._prefetches = prefetches
        self._counters = counters
        self._unawaited: dict[str, tuple[RequestState, int]] = {}
        """Requests that are computed without their look-up's answer, each with the last token at
        which its load could end."""

    def note_unawaited(self, state: RequestState, first: int) -> None:
        """The request is computed from the token `first`, though its look-up is under way."""
        if state.unawaited_from is None:
            self._counters.count("lookups_not_awaited")
        state.unawaited_from = first
        last = self._catalogue.last_end(state.request.num_tokens)
        self._unawaited[state.id] = state, last

    def decline_unawaited(self) -> None:
        """Counts declined loads of requests that did not wait for their look-up.

        Once the answer has come, it is known what such a request could have loaded."""
        over = [
            request_id
            for request_id, (state, _) in self._unawaited.items()
            if state.phase in (Phase.RUNNING, Phase.ENDED) and not self._lookups.is_under_way(state)
        ]
        for request_id in over:
            state, last = self._unawaited.pop(request_id)
            first, state.unawaited_from = state.unawaited_from, None
            if first is not None and (reaches := self._catalogue.reaches(request_id, first, last)):
                self.decline(state, first, reaches[-1].end)

    def forget(self, state: RequestState) -> None:
        """The request is gone, begins anew, or got its answer in time after all."""
        if self._unawaited.pop(state.id, None) is not None:
            state.unawaited_from = None

    def decline(self, state: RequestState, first: int, end: int) -> None:
        """The tokens from `first` to `end` are computed, though they could be loaded.

        They are counted once for each request. If the pool was not measured for long, a probe
        fetches some of their blocks."""
        if state.is_declined or end <= first:
            return
        state.is_declined = True
        self._counters.count("declined_tokens", end - first)
        group = self._catalogue.lacking(state.id, first, end)
        if group is None or state.policy != AUTO:
            return
        wanted = self._advisor.wants_probe(
            time.monotonic(),
            first,
            self._catalogue.whole(state.id, first, end),
            state.request.num_tokens,
            (self._agreement.block_bytes[group], self._agreement.block_objects[group]),
        )
        if wanted and self._prefetches.probe(state, first, end, wanted):
            self._counters.count("probes")
