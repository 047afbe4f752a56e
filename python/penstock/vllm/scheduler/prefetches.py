"""Prefetches: the jobs that bring blocks into host memory.

Two kinds of prefetches serve no request that waits. A probe only measures the pool. And a client
may tell of a prompt that comes next.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock._native import Catalogue
from penstock.vllm.agreement import Agreement
from penstock.vllm.scheduler.node_memory import NodeMemory
from penstock.vllm.scheduler.orders import Orders
from penstock.vllm.scheduler.requests import RequestState
from penstock.vllm.scheduler.transfers import Transfers


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


class Prefetches:
    """The open prefetches: some rank is not done with them, or their blocks are kept for a
    request."""

    def __init__(
        self,
        catalogue: Catalogue,
        agreement: Agreement,
        orders: Orders,
        transfers: Transfers,
        node_memory: NodeMemory,
    ) -> None:
        self._catalogue = catalogue
        self._agreement = agreement
        self._orders = orders
        self._transfers = transfers
        self._node_memory = node_memory
        self._open: dict[int, _Prefetch] = {}
        self._ahead: int | None = None
        """The last prefetch of a prompt that comes next."""

    @property
    def room(self) -> int:
        """The blocks that further prefetches may bring."""
        return self._agreement.prefetch_blocks - self._catalogue.prefetched

    @property
    def is_ahead(self) -> bool:
        """Whether the blocks of a prompt that comes next are on their way."""
        return self._ahead in self._open

    def fetch(self, state: RequestState, first: int, end: int) -> bool:
        """Fetches blocks for a request that waits, and keeps them until it is released. Returns
        whether there are any."""
        number = self._begin(state, first, end, self.room, name=state.id)
        if number is None:
            return False
        state.prefetches.append(number)
        return True

    def probe(self, state: RequestState, first: int, end: int, blocks: int) -> bool:
        """Fetches some blocks that host memory lacks. Returns whether there are any."""
        number = self._begin(
            state, first, end, blocks, name=state.id, is_awaited=False, is_probe=True
        )
        return number is not None

    def fetch_ahead(self, state: RequestState, name: str, end: int, most: int) -> None:
        """Fetches what host memory lacks of a prompt that comes next, up to the token `end`, but no
        more than `most` blocks. The catalogue knows the prompt as `name`; `state` told of it."""
        most = min(most, self.room)
        if most > 0:
            self._ahead = self._begin(state, 0, end, most, name=name, is_awaited=False)

    def _begin(
        self,
        state: RequestState,
        first: int,
        end: int,
        most: int,
        *,
        name: str,
        is_awaited: bool = True,
        is_probe: bool = False,
    ) -> int | None:
        number = self._orders.number()
        begun = self._catalogue.begin_prefetch(
            name, number, first, end, most, lacking=not is_awaited
        )
        if begun is None:
            return None
        blocks, moved = begun
        limits = self._transfers.begin(number, moved, is_probe=is_probe)
        self._open[number] = _Prefetch(self._agreement.ranks, is_awaited, name)
        self._orders.prefetch(number, state, blocks, *limits)
        return number

    def release(self, state: RequestState) -> None:
        """The request no longer needs the blocks that were prefetched for it."""
        for number in state.prefetches:
            self._release(number)
        state.prefetches.clear()

    def _release(self, number: int) -> None:
        prefetch = self._open[number]
        prefetch.is_released = True
        self._catalogue.release(number)
        self._orders.release(number)
        self._end_if_over(number)

    def on_done(self, number: int, ranks: int) -> None:
        """`ranks` more ranks are done with the prefetch."""
        prefetch = self._open[number]
        prefetch.ranks -= ranks
        if prefetch.ranks:
            return
        self._transfers.end(number)
        if prefetch.is_awaited and not prefetch.is_released:
            self._node_memory.look_up(prefetch.name)
        if not prefetch.is_awaited and not prefetch.is_released:
            self._release(number)
        else:
            self._end_if_over(number)

    def _end_if_over(self, number: int) -> None:
        prefetch = self._open[number]
        if prefetch.is_released and not prefetch.ranks:
            del self._open[number]
            self._catalogue.end(number)
