"""Tiered look-ups: a request's blocks are looked up in host memory first, then in the pool."""

from __future__ import annotations

from penstock._native import Catalogue
from penstock.vllm.scheduler.hashes import hand_over
from penstock.vllm.scheduler.lookups import Lookups
from penstock.vllm.scheduler.node_memory import NodeMemory
from penstock.vllm.scheduler.requests import RequestState
from penstock.vllm.scheduler.sharing import Sharing
from penstock.vllm.scheduler.spans import Spans


class TieredLookups:
    """The look-ups of requests in both tiers."""

    def __init__(
        self,
        catalogue: Catalogue,
        node_memory: NodeMemory,
        lookups: Lookups,
        sharing: Sharing,
        spans: Spans,
    ) -> None:
        self._catalogue = catalogue
        self._node_memory = node_memory
        self._lookups = lookups
        self._sharing = sharing
        self._spans = spans

    def start(self, state: RequestState) -> None:
        """Starts the request's look-up in the pool, unless host memory has all of the request."""
        request, catalogue = state.request, self._catalogue
        state.awaits = state.unawaited_from = state.advice = None
        hand_over(catalogue, state)
        self._node_memory.look_up(state.id)
        last = catalogue.last_end(request.num_tokens)
        in_host = catalogue.reaches(state.id, 0, last)
        is_shared = not state.is_private and self._sharing.is_shared(request)
        may_load = is_shared and last > 0 and not request.skip_reading_prefix_cache
        self._spans.begin(state, may_load=may_load)
        if (in_host and in_host[-1].end == last) or not is_shared:
            catalogue.set_miss(state.id)
        else:
            self._lookups.start(state)

    def refresh(self, state: RequestState) -> None:
        """Starts the request's look-up if it has none. Takes in all answers that have come."""
        if self._catalogue.is_asked(state.id) is None:
            self.start(state)
        self._lookups.take_answers()
