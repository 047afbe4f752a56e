"""Storing: a block is stored in the step that fills it, unless it is known to be in the pool or on
its way there.

A store reads its blocks some time after its step. Workers wait for that before a step that writes
to blocks which have changed hands (`flush`). An engine that writes earlier is kept from giving the
blocks away: they are held until they have been read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock._native import Blocks, Catalogue
from penstock.vllm.agreement import Agreement
from penstock.vllm.counters import Counters
from penstock.vllm.scheduler.announcing import Announcing
from penstock.vllm.scheduler.block_holds import BlockHolds
from penstock.vllm.scheduler.facts import BlockTables, EngineFacts
from penstock.vllm.scheduler.orders import Orders
from penstock.vllm.scheduler.requests import Tracked
from penstock.vllm.scheduler.sharing import Sharing


@dataclass
class _Store:
    """A store that some rank is not done with."""

    tracked: Tracked
    unread: int
    """Ranks that may still read its blocks."""
    undone: int
    """Ranks that are not done with it."""
    size: int
    """The number of its blocks."""
    blocks: Blocks | None
    """Blocks of the store, if they will be announced."""
    held: list[int] = field(default_factory=list)
    """The engine's blocks that are held for it."""
    began: float = field(default_factory=time.monotonic)
    unstored: set[int] = field(default_factory=set)
    """Positions of blocks that some rank did not bring into the pool."""


class Storing:
    """Stores of one engine."""

    def __init__(
        self,
        catalogue: Catalogue,
        facts: EngineFacts,
        agreement: Agreement,
        sharing: Sharing,
        orders: Orders,
        holds: BlockHolds,
        announcing: Announcing,
        counters: Counters,
    ) -> None:
        self._catalogue = catalogue
        self._facts = facts
        self._agreement = agreement
        self._sharing = sharing
        self._orders = orders
        self._holds = holds
        self._announcing = announcing
        self._counters = counters
        self._under_way: dict[int, _Store] = {}

    def store_filled(self, tracked: Tracked, tables: BlockTables, computed: int) -> None:
        """Orders the store of every new block that is full after `computed` tokens."""
        if not self._sharing.may_store(tracked):
            return
        number = self._orders.number()
        own = [tables[group.index] for group in self._facts.groups]
        self._catalogue.extend(tracked.id, tracked.request.block_hashes)
        blocks = self._catalogue.begin_store(
            tracked.id, number, computed, own, self._facts.null_block
        )
        if blocks is None:
            return
        ranks = self._agreement.ranks
        announced = blocks if self._announcing.needs_blocks else None
        self._under_way[number] = _Store(
            tracked, ranks, ranks, len(blocks), announced, self._holds.hold(blocks)
        )
        tracked.stores.add(number)
        self._orders.store(number, tracked, blocks)

    def flush_given_away(self, new_blocks: Callable[[], Iterable[int]]) -> None:
        """Orders workers to read blocks before the step, if the engine has given them to other
        requests. This happens to blocks that left a window."""
        if self._catalogue.is_reading:
            self._orders.flush(self._catalogue.readers(list(new_blocks())))

    def on_released(self, number: int, ranks: int) -> None:
        """`ranks` more ranks have read a store's blocks."""
        store = self._under_way[number]
        store.unread -= ranks
        if not store.unread:
            self._catalogue.on_read(number)
            store.tracked.stores.discard(number)
            self._free(store)

    def free(self) -> None:
        """No store reads the engine's blocks any more."""
        for store in self._under_way.values():
            self._free(store)

    def _free(self, store: _Store) -> None:
        self._holds.free(store.held)
        store.held = []

    def on_stored(self, number: int, ranks: int, unstored: set[int]) -> None:
        """`ranks` more ranks are done with a store. They did not bring the blocks at the positions
        `unstored` into the pool."""
        store = self._under_way[number]
        store.undone -= ranks
        store.unstored |= unstored
        if store.undone:
            return
        del self._under_way[number]
        if number <= self._sharing.weights.last_old_job:
            # The pool has them, but not as blocks of the weights of now.
            store.unstored = set(range(store.size))
        self._counters.observe("store_delay_seconds", time.monotonic() - store.began)
        stored = self._catalogue.end_store(number, sorted(store.unstored))
        self._counters.count("stored_blocks", stored)
        self._announcing.on_stored(store.tracked, store.blocks, store.unstored, stored)
