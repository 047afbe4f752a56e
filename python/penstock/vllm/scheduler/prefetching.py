"""Prefetching: brings the blocks of a request's load into host memory while the request waits.

Two kinds of prefetches serve no request that waits. A probe only measures the pool. And a client
may tell of a prompt that comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock._native import Choice
from penstock.vllm.groups import Group
from penstock.vllm.scheduler.common import Common
from penstock.vllm.scheduler.requests import Phase, Tracked
from penstock.vllm.scheduler.transfers import Transfers

IsCached = Callable[[bytes, int], bool]
"""Block hash and group of the engine → whether the engine's own prefix cache has the block."""


@dataclass
class _Prefetch:
    ranks: int
    """Number of ranks that are not done with it yet."""
    is_awaited: bool
    """Whether a request waits for it. Else its blocks are released once it is done: from then on
    they stay in host memory as others do."""
    name: str
    """What the catalogue knows the prompt by."""
    is_released: bool = False


class Prefetching:
    """The open prefetches: some rank is not done with them, or their blocks are kept for a
    request."""

    def __init__(self, common: Common, transfers: Transfers) -> None:
        self._common = common
        self._catalogue = common.catalogue
        self._transfers = transfers
        self._open: dict[int, _Prefetch] = {}
        self._ahead: int | None = None
        """The last prefetch of a prompt that comes next."""
        self._undecided: dict[str, Tracked] = {}
        """Requests whose prefetch is not decided yet. It is decided once, however long the request
        waits, unless another engine is storing blocks for it."""
        self.is_cached: IsCached = lambda block_hash, group: False
        """Tells which blocks need no prefetch, because the engine's own prefix cache has them."""

    # --- requests that wait ---------------------------------------------------------------

    def note_arrival(self, tracked: Tracked) -> None:
        """A request has come: it may have to wait. Or it waits, and more of it may be there."""
        if self._common.role.loads:
            self._undecided[tracked.id] = tracked

    def forget(self, tracked: Tracked) -> None:
        """The request waits no more."""
        self._undecided.pop(tracked.id, None)
        self.release(tracked)

    def order_for_waiting(
        self,
        is_answered: Callable[[Tracked], bool],
        advise: Callable[[Tracked, int], Choice | None],
    ) -> None:
        """Orders prefetches for requests that wait for their turn, as far as `advise` says."""
        for tracked in list(self._undecided.values()):
            if self._room() <= 0:
                return
            if tracked.phase is not Phase.WAITING:
                del self._undecided[tracked.id]
            elif is_answered(tracked):
                del self._undecided[tracked.id]
                self._order(tracked, advise)

    def _room(self) -> int:
        return self._common.agreement.prefetch_blocks - self._catalogue.prefetched

    def _order(self, tracked: Tracked, advise: Callable[[Tracked, int], Choice | None]) -> None:
        if tracked.request.skip_reading_prefix_cache:
            return
        first = self._cached_tokens(tracked)
        choice = advise(tracked, first)
        if choice is None or self._catalogue.lacking(tracked.id, first, choice.end) is None:
            return
        number = self._begin(tracked, first, choice.end, self._room(), name=tracked.id)
        if number is not None:
            self._common.counters.count("prefetches", not tracked.prefetches)
            tracked.prefetches.append(number)

    def _cached_tokens(self, tracked: Tracked) -> int:
        """About how many tokens of the prompt's beginning the engine has in its own cache.

        The beginning of a prompt stays in that cache longer than the rest. So a binary search over
        the blocks is enough."""
        end = self._common.last(tracked)
        for group in self._common.facts.groups:
            if group.window is None and group.state is None:
                end = min(end, self._cached_blocks(tracked, group) * group.block_size)
        return end // self._catalogue.alignment * self._catalogue.alignment

    def _cached_blocks(self, tracked: Tracked, group: Group) -> int:
        hashes = tracked.request.block_hashes
        each = group.block_size // self._common.facts.hash_tokens
        low, high = 0, len(hashes) // each
        while low < high:
            middle = (low + high) // 2
            if self.is_cached(hashes[(middle + 1) * each - 1], group.index):
                low = middle + 1
            else:
                high = middle
        return low

    # --- prefetches -----------------------------------------------------------------------

    def probe(self, tracked: Tracked, first: int, end: int, blocks: int) -> bool:
        """Fetches some blocks that host memory lacks. Returns whether there are any."""
        number = self._begin(
            tracked, first, end, blocks, name=tracked.id, is_awaited=False, is_probe=True
        )
        return number is not None

    def fetch_ahead(self, tracked: Tracked, name: str, end: int, most: int) -> None:
        """Fetches what host memory lacks of a prompt that comes next, up to the token `end`, but no
        more than `most` blocks. The catalogue knows the prompt as `name`; `tracked` told of it."""
        most = min(most, self._room())
        if most > 0:
            self._ahead = self._begin(tracked, 0, end, most, name=name, is_awaited=False)

    @property
    def is_ahead(self) -> bool:
        """Whether the blocks of a prompt that comes next are on their way."""
        return self._ahead in self._open

    def _begin(
        self,
        tracked: Tracked,
        first: int,
        end: int,
        most: int,
        *,
        name: str,
        is_awaited: bool = True,
        is_probe: bool = False,
    ) -> int | None:
        number = self._common.orders.number()
        begun = self._catalogue.begin_prefetch(
            name, number, first, end, most, lacking=not is_awaited
        )
        if begun is None:
            return None
        blocks, moved = begun
        limits = self._transfers.begin(number, moved, is_probe=is_probe)
        self._open[number] = _Prefetch(self._common.agreement.ranks, is_awaited, name)
        self._common.orders.prefetch(number, tracked, blocks, *limits)
        return number

    def release(self, tracked: Tracked) -> None:
        """The request no longer needs the blocks that were prefetched for it."""
        for number in tracked.prefetches:
            self._release(number)
        tracked.prefetches.clear()

    def _release(self, number: int) -> None:
        prefetch = self._open[number]
        prefetch.is_released = True
        self._catalogue.release(number)
        self._common.orders.release(number)
        self._end_if_over(number)

    def on_done(self, number: int, ranks: int) -> None:
        """`ranks` more ranks are done with the prefetch."""
        prefetch = self._open[number]
        prefetch.ranks -= ranks
        if prefetch.ranks:
            return
        self._transfers.end(number)
        if prefetch.is_awaited and not prefetch.is_released:
            self._common.look_in_node(prefetch.name)
        if not prefetch.is_awaited and not prefetch.is_released:
            self._release(number)
        else:
            self._end_if_over(number)

    def _end_if_over(self, number: int) -> None:
        prefetch = self._open[number]
        if prefetch.is_released and not prefetch.ranks:
            del self._open[number]
            self._catalogue.end(number)
