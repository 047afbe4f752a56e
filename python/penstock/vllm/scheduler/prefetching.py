"""Prefetching: brings the blocks of a request's load into host memory while the request waits."""

from __future__ import annotations

from collections.abc import Callable

from penstock._native import Catalogue, Choice
from penstock.vllm.counters import Counters
from penstock.vllm.groups import Group
from penstock.vllm.roles import Role
from penstock.vllm.scheduler.facts import EngineFacts
from penstock.vllm.scheduler.prefetches import Prefetches
from penstock.vllm.scheduler.requests import Phase, RequestState

IsCached = Callable[[bytes, int], bool]
"""Block hash and group of the engine → whether the engine's own prefix cache has the block."""

Advise = Callable[[RequestState, int, int], Choice | None]
"""A request, a token and the last token at which its load may end → how far to load from the first
token; None for not at all."""


class Prefetching:
    """The requests that wait for their turn, and whose prefetch is not decided yet."""

    def __init__(
        self,
        catalogue: Catalogue,
        facts: EngineFacts,
        role: Role,
        prefetches: Prefetches,
        counters: Counters,
    ) -> None:
        self._catalogue = catalogue
        self._facts = facts
        self._role = role
        self._prefetches = prefetches
        self._counters = counters
        self._undecided: dict[str, RequestState] = {}
        """Requests whose prefetch is not decided yet. It is decided once, however long the request
        waits, unless another engine is storing blocks for it."""
        self.is_cached: IsCached = lambda block_hash, group: False
        """Tells which blocks need no prefetch, because the engine's own prefix cache has them."""

    def note_arrival(self, state: RequestState) -> None:
        """A request has come: it may have to wait. Or it waits, and more of it may be there."""
        if self._role.loads:
            self._undecided[state.id] = state

    def forget(self, state: RequestState) -> None:
        """The request waits no more."""
        self._undecided.pop(state.id, None)
        self._prefetches.release(state)

    def order_for_waiting(
        self, is_answered: Callable[[RequestState], bool], advise: Advise
    ) -> None:
        """Orders prefetches for requests that wait for their turn, as far as `advise` says."""
        for state in list(self._undecided.values()):
            if self._prefetches.room <= 0:
                return
            if state.phase is not Phase.WAITING:
                del self._undecided[state.id]
            elif is_answered(state):
                del self._undecided[state.id]
                self._order(state, advise)

    def _order(self, state: RequestState, advise: Advise) -> None:
        if state.request.skip_reading_prefix_cache:
            return
        last = self._catalogue.last_end(state.request.num_tokens)
        first = self._cached_tokens(state, last)
        choice = advise(state, first, last)
        if choice is None or self._catalogue.lacking(state.id, first, choice.end) is None:
            return
        is_first = not state.prefetches
        if self._prefetches.fetch(state, first, choice.end):
            self._counters.count("prefetches", is_first)

    def _cached_tokens(self, state: RequestState, last: int) -> int:
        """About how many tokens of the prompt's beginning, up to the token `last`, the engine has
        in its own cache.

        The beginning of a prompt stays in that cache longer than the rest. So a binary search over
        the blocks is enough."""
        end = last
        for group in self._facts.groups:
            if group.window is None and group.state is None:
                end = min(end, self._cached_blocks(state, group) * group.block_size)
        return end // self._catalogue.alignment * self._catalogue.alignment

    def _cached_blocks(self, state: RequestState, group: Group) -> int:
        block_hashes = state.request.block_hashes
        each = group.block_size // self._facts.hash_tokens
        low, high = 0, len(block_hashes) // each
        while low < high:
            middle = (low + high) // 2
            if self.is_cached(block_hashes[(middle + 1) * each - 1], group.index):
                low = middle + 1
            else:
                high = middle
        return low
