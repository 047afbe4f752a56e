"""Block holds: the engine's blocks that it must not give away while a store reads them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock._native import Blocks
from penstock.vllm.scheduler.facts import EngineBlocks


class BlockHolds:
    """The holds of one engine's blocks."""

    def __init__(self, *, are_needed: bool) -> None:
        """`are_needed` says whether the engine may take blocks back, or write to them, before
        workers have read them."""
        self._are_needed = are_needed
        self.engine_blocks: EngineBlocks | None = None
        """The engine's blocks. None until the engine has any, and so before its first step."""

    def hold(self, blocks: Blocks) -> list[int]:
        """Holds the engine's blocks if need be. Returns those that are held."""
        if not self._are_needed:
            return []
        assert self.engine_blocks is not None, "the engine has not shown its block pool"
        # Each once: layers of a drafter share the blocks of the model's.
        held = list(dict.fromkeys(blocks.block_ids))
        self.engine_blocks.hold(held)
        return held

    def free(self, held: Sequence[int]) -> None:
        """Ends the hold of these blocks."""
        if held:
            assert self.engine_blocks is not None
            # The first block of a prompt is worth most: it goes last into the engine's queue of
            # free blocks, as when a request ends.
            self.engine_blocks.free(reversed(held))
