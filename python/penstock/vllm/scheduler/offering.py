"""Offering: how much of a request comes from the pool or from host memory.

A load begins at the first token that the engine does not have. It takes the longest run of tokens
that meets three conditions:

- A look-up found the run's blocks present on all ranks. In a group with a window, only the blocks
  of the last window count.
- The run ends before the prompt's last token. So the engine is in the same state as after a hit in
  its own prefix cache.
- The run is expected to be loaded sooner than it could be computed.

Now and then, a request is computed all the same, to compare its blocks with the pool's.
"""

from __future__ import annotations

from penstock._native import Catalogue
from penstock.vllm.scheduler.advising import Advising
from penstock.vllm.scheduler.handover import Handover
from penstock.vllm.scheduler.hashes import hand_over
from penstock.vllm.scheduler.lookup_waits import LookupWaits
from penstock.vllm.scheduler.prefetching import Prefetching
from penstock.vllm.scheduler.requests import Offer, RequestState
from penstock.vllm.scheduler.savings import Savings
from penstock.vllm.scheduler.sharing import Sharing
from penstock.vllm.scheduler.tiered_lookups import TieredLookups
from penstock.vllm.scheduler.witnessing import Witnessing


class Offering:
    """The offers of loads to the engine."""

    def __init__(
        self,
        catalogue: Catalogue,
        sharing: Sharing,
        lookups: TieredLookups,
        handover: Handover,
        waits: LookupWaits,
        advising: Advising,
        witnessing: Witnessing,
        prefetching: Prefetching,
        savings: Savings,
    ) -> None:
        self._catalogue = catalogue
        self._sharing = sharing
        self._lookups = lookups
        self._handover = handover
        self._waits = waits
        self._advising = advising
        self._witnessing = witnessing
        self._prefetching = prefetching
        self._savings = savings

    def match(self, state: RequestState, first: int) -> int | None:
        """How many tokens to load from `first` on. None while this is not known, or if the tokens
        will soon be a local hit."""
        self._sharing.note_local_hit(state, first)
        state.reached = first
        tokens = self._match(state, first)
        if tokens is None:
            self._savings.begin_wait(state)
        else:
            self._savings.end_wait(state)
        return tokens

    def _match(self, state: RequestState, first: int) -> int | None:
        if state.request.resumable:
            # It may go on with another token than its last look-up knew.
            hand_over(self._catalogue, state)
        last = self._catalogue.last_end(state.request.num_tokens)
        if last <= first or not self._sharing.may_load(state):
            return 0
        self._lookups.refresh(state)
        if self._handover.awaits(state, first) or self._waits.awaits(state, first, last):
            return None
        choice = self._advising.advise(state, first, last)
        if choice is None:
            return 0
        if self._catalogue.is_loading(state.id, first, choice.end):
            # Another request is loading the block. After that, this request has a local hit.
            return None
        offer = Offer(first, choice)
        if self._sharing.may_store(state) and self._witnessing.chooses(state, offer):
            self._prefetching.forget(state)
            return 0
        state.offer = offer
        return choice.end - first
