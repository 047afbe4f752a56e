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

from penstock._native import Blocks
from penstock.vllm.scheduler.common import Common
from penstock.vllm.scheduler.events import Events
from penstock.vllm.scheduler.facts import BlockTables, EngineBlocks
from penstock.vllm.scheduler.requests import Tracked


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

    def __init__(self, common: Common, events: Events | None) -> None:
        self._common = common
        self._events = events
        self._catalogue = common.catalogue
        self._under_way: dict[int, _Store] = {}
        self.engine_blocks: EngineBlocks | None = None
        """The engine's blocks. None until the engine has any, and so before its first step."""

    def store_filled(self, tracked: Tracked, tables: BlockTables, computed: int) -> None:
        """Orders the store of every new block that is full after `computed` tokens."""
        if not self._common.role.stores or not self._common.is_shared(tracked.request):
            return
        if tracked.is_stale:
            return
        number = self._common.orders.number()
        own = [tables[group.index] for group in self._common.facts.groups]
        self._catalogue.extend(tracked.id, tracked.request.block_hashes)
        blocks = self._catalogue.begin_store(
            tracked.id, number, computed, own, self._common.facts.null_block
        )
        if blocks is None:
            return
        ranks = self._common.agreement.ranks
        announced = blocks if self._events is not None else None
        self._under_way[number] = _Store(
            tracked, ranks, ranks, len(blocks), announced, self._hold(blocks)
        )
        tracked.stores.add(number)
        self._common.orders.store(number, tracked, blocks)

    def _hold(self, blocks: Blocks) -> list[int]:
        """Holds the engine's blocks if need be. Returns those that are held."""
        if not self._common.facts.holds_blocks:
            return []
        assert self.engine_blocks is not None, "the engine has not shown its block pool"
        # Each once: layers of a drafter share the blocks of the model's.
        held = list(dict.fromkeys(blocks.block_ids))
        self.engine_blocks.hold(held)
        return held

    def flush_given_away(self, new_blocks: Callable[[], Iterable[int]]) -> None:
        """Orders workers to read blocks before the step, if the engine has given them to other
        requests. This happens to blocks that left a window."""
        if self._catalogue.is_reading:
            self._common.orders.flush(self._catalogue.readers(list(new_blocks())))

    def on_released(self, number: int, ranks: int) -> None:
        """`ranks` more ranks have read a store's blocks."""
        store = self._under_way[number]
        store.unread -= ranks
        if not store.unread:
            self._catalogue.on_read(number)
            store.tracked.stores.discard(number)
            self._let_go(store)

    def let_go(self) -> None:
        """No store reads the engine's blocks any more."""
        for store in self._under_way.values():
            self._let_go(store)

    def _let_go(self, store: _Store) -> None:
        if store.held:
            assert self.engine_blocks is not None
            # The first block of a prompt is worth most: it goes last into the engine's queue of
            # free blocks, as when a request ends.
            self.engine_blocks.let_go(reversed(store.held))
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
        if number <= self._common.weights.last_old_job:
            # The pool has them, but not as blocks of the weights of now.
            store.unstored = set(range(store.size))
        self._common.counters.observe("store_delay_seconds", time.monotonic() - store.began)
        stored = self._catalogue.end_store(number, sorted(store.unstored))
        self._common.counters.count("stored_blocks", stored)
        if self._events is not None and store.blocks is not None:
            self._events.on_stored(store.tracked, store.blocks, store.unstored)
        if stored:
            self._common.descriptions.publish(store.tracked.tenant)
