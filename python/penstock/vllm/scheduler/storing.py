"""Storing: a block is stored in the step that fills it, unless it is known to be in the pool or on
its way there.

A store reads its blocks some time after its step. An engine must not give them away before:

- With windows or states, vLLM takes back what a request needs no more, and gives it to the very
  next step. With zeroes, it writes before workers learn of it. There blocks are held until they
  have been read.
- Else blocks change hands by preemption only. Workers then give up what they have not begun to read
  (`flush`), and wait for the rest before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock._native import Catalogue
from penstock.vllm.scheduler.facts import BlockTables, EngineFacts
from penstock.vllm.scheduler.hashes import hand_over
from penstock.vllm.scheduler.orders import Orders
from penstock.vllm.scheduler.requests import RequestState
from penstock.vllm.scheduler.sharing import Sharing
from penstock.vllm.scheduler.stores import Stores
from penstock.vllm.scheduler.witnessing import Witnessing


class Storing:
    """The decisions of one engine which blocks to store."""

    def __init__(
        self,
        catalogue: Catalogue,
        facts: EngineFacts,
        sharing: Sharing,
        orders: Orders,
        stores: Stores,
        witnessing: Witnessing,
    ) -> None:
        self._catalogue = catalogue
        self._facts = facts
        self._sharing = sharing
        self._orders = orders
        self._stores = stores
        self._witnessing = witnessing

    def store_filled(self, state: RequestState, tables: BlockTables, computed: int) -> None:
        """Orders the store of every new block that is full after `computed` tokens. Some that the
        pool has may go with them, to be compared."""
        if not self._sharing.may_store(state):
            return
        hand_over(self._catalogue, state)
        if state.is_private:
            return
        number = self._orders.number()
        own = [tables[group.index] for group in self._facts.groups]
        allowed = self._witnessing.allowed(state)
        begun = self._catalogue.begin_store(
            state.id, number, computed, own, self._facts.null_block, witnesses=allowed
        )
        if begun is None:
            return
        blocks, witnesses, is_own = begun
        self._stores.begin(number, state, blocks, witnesses)
        state.witnesses += witnesses
        # The pool may have got some of the others, too, since it was asked.
        compared = max(witnesses, min(allowed, len(blocks))) if is_own else 0
        self._orders.store(number, state, blocks, witnesses=compared)

    def flush_given_away(self, new_blocks: Callable[[], Iterable[int]]) -> None:
        """Orders workers to end their reading of blocks before the step, if the engine has given
        them to others."""
        if self._catalogue.is_reading:
            self._orders.flush(self._catalogue.readers(list(new_blocks())))
