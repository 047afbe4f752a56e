"""The engine's block pool: what its prefix cache has, and who holds a block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any


class BlockPool:
    """vLLM's blocks of one engine, in the scheduler's process."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def is_cached(self, block_hash: bytes, group: int) -> bool:
        """Whether the engine's own prefix cache has the block, in this group of vLLM."""
        return self._pool.get_cached_block(block_hash, [group]) is not None

    def watch_resets(self, is_reset: Callable[[], None]) -> None:
        """Has `is_reset` called whenever the engine's own prefix cache has been emptied."""
        reset = self._pool.reset_prefix_cache

        @functools.wraps(reset)
        def watched() -> bool:
            done: bool = reset()
            if done:
                is_reset()
            return done

        self._pool.reset_prefix_cache = watched

    def hold(self, blocks: Iterable[int]) -> None:
        """Keeps vLLM from giving these blocks to another request, whatever becomes of theirs."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def free(self, blocks: Iterable[int]) -> None:
        """Ends a :meth:`hold` of these blocks. The last of them stays longest in the engine's
        prefix cache, if they belong to no request any more."""
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])
