"""Loading: the loads that the engine takes, from their order until they are over."""

from __future__ import annotations

from collections.abc import Iterable

from penstock._native import Catalogue
from penstock.vllm.counters import Counters
from penstock.vllm.groups import Groups
from penstock.vllm.scheduler.facts import BlockTables
from penstock.vllm.scheduler.orders import Orders
from penstock.vllm.scheduler.requests import Phase, RequestState
from penstock.vllm.scheduler.savings import Savings
from penstock.vllm.scheduler.spans import Spans
from penstock.vllm.scheduler.transfers import Transfers


class Loading:
    """The loads of one engine."""

    def __init__(
        self,
        catalogue: Catalogue,
        groups: Groups,
        orders: Orders,
        transfers: Transfers,
        savings: Savings,
        spans: Spans,
        counters: Counters,
    ) -> None:
        self._catalogue = catalogue
        self._groups = groups
        self._orders = orders
        self._transfers = transfers
        self._savings = savings
        self._spans = spans
        self._counters = counters
        self._unloaded: dict[int, set[int]] = {}
        """Load → positions of its blocks that did not come, from the ranks' reports so far."""
        self._given_up: set[int] = set()
        """Loads whose blocks the engine took away."""

    def begin(self, state: RequestState, tables: BlockTables, tokens: int) -> None:
        """The engine has allocated blocks for the first `tokens` tokens of the last offer."""
        offer = state.offer
        if offer is None or tokens > offer.end - offer.first:
            raise RuntimeError(f"{tokens} tokens are to be loaded, more than were offered: {offer}")
        number = self._orders.number()
        own = [tables[group.index] for group in self._groups]
        end = offer.first + tokens
        blocks, moved = self._catalogue.begin_load(state.id, number, offer.first, end, own)
        limits = self._transfers.begin(number, moved, offer.choice)
        state.load = self._orders.load(number, state, blocks, *limits)
        state.phase = Phase.LOADING
        state.reached = end
        state.load_bytes = (moved.host_bytes, moved.pool_bytes)
        self._savings.begin_wait(state)
        self._spans.begin_load(state, number, tokens, blocks, *state.load_bytes)
        if self._catalogue.is_reading:
            self._orders.flush(self._catalogue.readers(blocks.block_ids))

    def cancel(self, job: int) -> None:
        """The load's request is gone. The engine keeps the blocks until the load has ended."""
        self._orders.cancel_load(job)

    def give_up(self, jobs: Iterable[int]) -> None:
        """The engine took the blocks of these loads away. Their requests begin anew once every
        rank has said that its load is over."""
        self._given_up.update(jobs)

    def note_unloaded(self, unloaded: dict[int, set[int]]) -> None:
        """Notes blocks of loads that did not come on some rank."""
        for number, positions in unloaded.items():
            self._unloaded.setdefault(number, set()).update(positions)

    def end(self, state: RequestState) -> None:
        """The request's load is over on all ranks."""
        job, state.load = state.load, None
        assert job is not None
        assert state.offer is not None
        self._savings.end_wait(state)
        seconds = self._transfers.end(job.job)
        self._catalogue.end(job.job)
        unloaded = self._unloaded.pop(job.job, set())
        self._spans.end_load(state, job.job, seconds, len(unloaded))
        is_given_up = job.job in self._given_up
        self._given_up.discard(job.job)
        if state.phase is Phase.ENDED:
            return
        state.phase = Phase.WAITING
        if is_given_up:
            return
        state.is_failed = bool(unloaded)
        if not unloaded:
            self._savings.on_loaded(state, state.offer.first, state.offer.end)
            self._counters.count("loaded_tokens", state.offer.end - state.offer.first)
        elif len(self._groups) == 1:
            loaded = len(job.blocks) - len(unloaded)
            self._counters.count("loaded_tokens", loaded * self._groups[0].block_size)
