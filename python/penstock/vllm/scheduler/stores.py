"""Stores under way: from their order until all ranks are done with them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from penstock._native import Blocks, Catalogue
from penstock.vllm.agreement import Agreement
from penstock.vllm.counters import Counters
from penstock.vllm.scheduler.announcing import Announcing
from penstock.vllm.scheduler.block_holds import BlockHolds
from penstock.vllm.scheduler.requests import RequestState
from penstock.vllm.scheduler.weights import Weights
from penstock.vllm.scheduler.witnessing import Witnessing


@dataclass
class _Store:
    """A store that some rank is not done with."""

    state: RequestState
    unread: int
    """Ranks that may still read its blocks."""
    undone: int
    """Ranks that are not done with it."""
    size: int
    """The number of its blocks."""
    witnesses: int
    """The number of those, at the end, that the pool had before."""
    blocks: Blocks | None
    """Blocks of the store, if they will be announced."""
    held: list[int] = field(default_factory=list)
    """The engine's blocks that are held for it."""
    began: float = field(default_factory=time.monotonic)
    unstored: set[int] = field(default_factory=set)
    """Positions of blocks that some rank did not bring into the pool."""
    disagreed: set[int] = field(default_factory=set)
    """Positions of blocks that the pool had otherwise, for some rank."""


class Stores:
    """The stores of one engine."""

    def __init__(
        self,
        catalogue: Catalogue,
        agreement: Agreement,
        weights: Weights,
        holds: BlockHolds,
        announcing: Announcing,
        witnessing: Witnessing,
        counters: Counters,
    ) -> None:
        self._catalogue = catalogue
        self._agreement = agreement
        self._weights = weights
        self._holds = holds
        self._announcing = announcing
        self._witnessing = witnessing
        self._counters = counters
        self._under_way: dict[int, _Store] = {}

    def begin(self, number: int, state: RequestState, blocks: Blocks, witnesses: int) -> None:
        """A store of a request's blocks begins. The pool has the last `witnesses` of them. Holds
        the engine's blocks if need be."""
        ranks = self._agreement.ranks
        announced = blocks if self._announcing.needs_blocks else None
        self._under_way[number] = _Store(
            state, ranks, ranks, len(blocks), witnesses, announced, self._holds.hold(blocks)
        )
        self._witnessing.on_ordered(number, witnesses)
        state.stores.add(number)

    def on_released(self, number: int, ranks: int) -> None:
        """`ranks` more ranks have read a store's blocks."""
        store = self._under_way[number]
        store.unread -= ranks
        if not store.unread:
            self._catalogue.on_read(number)
            store.state.stores.discard(number)
            self._free(store)

    def free(self) -> None:
        """No store reads the engine's blocks any more."""
        for store in self._under_way.values():
            self._free(store)

    def _free(self, store: _Store) -> None:
        self._holds.free(store.held)
        store.held = []

    def on_stored(self, number: int, ranks: int, unstored: set[int], disagreed: set[int]) -> None:
        """`ranks` more ranks are done with a store. They did not bring the blocks at the positions
        `unstored` into the pool; it had those at `disagreed` otherwise."""
        store = self._under_way[number]
        store.undone -= ranks
        store.unstored |= unstored
        store.disagreed |= disagreed
        if store.undone:
            return
        del self._under_way[number]
        if self._weights.is_old_job(number):
            # The pool has them, but not as blocks of the weights of now.
            store.unstored, store.disagreed = set(range(store.size)), set()
        self._witnessing.on_stored(number)
        self._counters.observe("store_delay_seconds", time.monotonic() - store.began)
        stored = self._catalogue.end_store(number, sorted(store.unstored), sorted(store.disagreed))
        self._counters.count("stored_blocks", stored)
        known = range(store.size - store.witnesses, store.size)
        self._announcing.on_stored(
            store.state, store.blocks, store.unstored.union(known), store.disagreed, stored
        )
