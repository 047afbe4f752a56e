"""What the pool has, as far as look-ups, stores and loads have told."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from penstock._native import Lookup, Store
from penstock.errors import StoreError
from penstock.vllm.messages import Span, block_name
from penstock.vllm.stats import PenstockStats

_REMEMBERED = 1 << 18
"""How many blocks' presence is remembered (tens of MB at most); forgetting costs a second put,
which the store recognizes."""

Query = tuple[bytes, Sequence[bytes], Sequence[Span]]
"""A group's namespace, hashes of blocks, and the spans of the objects that each consists of."""


class Presence:
    """Look-ups under way, and blocks of which it is known whether the pool has them."""

    def __init__(self, store: Store, timeout: float, stats: PenstockStats) -> None:
        """A look-up that is not answered within `timeout` seconds has found nothing."""
        self._lookup = Lookup(store)
        self._timeout = timeout
        self._stats = stats
        self._next_number = 0
        self._answers: dict[int, list[bool] | None] = {}
        self.latency: float | None = None
        """Seconds that the last look-up took, infinite if it failed; None before the first."""
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._foreign: OrderedDict[bytes, None] = OrderedDict()
        """Blocks that are in the pool but cannot be decrypted: they need not be loaded, nor stored
        as long as they are there."""

    # --- look-ups -------------------------------------------------------------------------

    def ask(self, queries: Iterable[Query]) -> list[int]:
        """Starts look-ups; returns their numbers, none if more wait than may."""
        numbers: list[int] = []
        self._stats.count("lookups")
        try:
            for namespace, hashes, spans in queries:
                self._stats.count("lookup_blocks", len(hashes))
                self._next_number += 1
                self._lookup.submit(
                    self._next_number, namespace, list(hashes), list(spans), self._timeout
                )
                numbers.append(self._next_number)
        except StoreError:
            self._stats.count("lookup_failures")
            self.drop(numbers)
            return []
        return numbers

    def answers(self, numbers: Sequence[int]) -> list[list[bool]] | None:
        """What look-ups found, block by block, and nothing where one failed; None while one of them
        is under way. An answer is given once."""
        for number, answer, seconds in self._lookup.poll():
            if isinstance(answer, str):
                self._stats.count("lookup_failures")
                self._answers[number] = None
                self.latency = math.inf
            else:
                self.latency = seconds
                self._stats.count("lookup_hit_blocks", sum(answer))
                self._answers[number] = answer
        if not all(number in self._answers for number in numbers):
            return None
        return [self._answers.pop(number) or [] for number in numbers]

    def drop(self, numbers: Iterable[int]) -> None:
        """Nobody waits for these look-ups any more."""
        for number in numbers:
            self._lookup.cancel(number)
            self._answers.pop(number, None)

    # --- what is known --------------------------------------------------------------------

    def learn(self, group: int, hashes: Sequence[bytes], present: Sequence[bool]) -> list[bool]:
        """Takes in which blocks are in the pool; returns which of them can be loaded."""
        loadable = []
        for block_hash, is_present in zip(hashes, present, strict=False):
            name = block_name(group, block_hash)
            if is_present:
                self.add(name)
            else:
                self._known.pop(name, None)
                self._foreign.pop(name, None)
            loadable.append(is_present and name not in self._foreign)
        return loadable

    def __contains__(self, name: object) -> bool:
        """Whether a block is known to be in the pool."""
        return name in self._known

    def add(self, name: bytes) -> None:
        """A block is in the pool."""
        _remember(self._known, name)

    def remove(self, name: bytes) -> None:
        """A block is not in the pool, or not whole."""
        self._known.pop(name, None)

    def add_foreign(self, name: bytes) -> None:
        """A block is in the pool, encrypted with a key that this engine does not have."""
        _remember(self._foreign, name)

    def forget(self) -> None:
        """Forgets what is known; look-ups will tell again."""
        self._known.clear()
        self._foreign.clear()

    def shutdown(self) -> None:
        """Ends the look-up threads; unanswered look-ups are dropped."""
        self._lookup.shutdown()


def _remember(blocks: OrderedDict[bytes, None], name: bytes) -> None:
    blocks[name] = None
    blocks.move_to_end(name)
    if len(blocks) > _REMEMBERED:
        blocks.popitem(last=False)
