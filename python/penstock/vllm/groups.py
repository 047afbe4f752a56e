"""The KV-cache groups that blocks are loaded and stored of.

vLLM gives layers that need different blocks a block table each (hybrid models: some layers attend
to all tokens, others to the last few). A uniform model has one group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Layers that share one block table."""

    index: int
    """Among vLLM's groups, of which some may not be transferred."""
    kind: str
    """vLLM's name for it, like ``full_attention``."""
    block_size: int
    """Tokens in a block."""
    window: int | None
    """Tokens that a layer attends to, the present one included; None for all before it."""
    dtype: str
    layer_names: tuple[str, ...]

    def first_needed(self, tokens: int) -> int:
        """The first block that is needed to compute on from `tokens` tokens.

        >>> Group(0, "sliding_window", 16, 20, "", ()).first_needed(64)
        2
        >>> Group(0, "full_attention", 16, None, "", ()).first_needed(64)
        0
        """
        if self.window is None:
            return 0
        return max(0, tokens - self.window + 1) // self.block_size


class Groups(Sequence[Group]):
    """All groups of a model that are transferred."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = tuple(groups)
        self.alignment = math.lcm(*(group.block_size for group in groups))
        """Tokens of the shortest run that is whole blocks in every group."""

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> Group:  # type: ignore[override]
        return self._groups[index]

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def reach(self, present: Sequence[Sequence[bool]], first: int, limit: int) -> int:
        """The end of the longest run of tokens from `first` that can be loaded.

        `present` tells for each group which blocks the pool has, from the prompt's start; a run
        ends at `limit` at the latest. Both are multiples of the alignment. Layers that attend to
        all tokens need every block of the run, the others those of the window at its end. The
        result is `first` if nothing can be loaded.
        """
        end = limit
        for group, has in zip(self._groups, present, strict=True):
            if group.window is None:
                block = first // group.block_size
                while block < min(len(has), end // group.block_size) and has[block]:
                    block += 1
                end = block * group.block_size // self.alignment * self.alignment
        while end > first and not all(
            self._has_window(group, has, first, end)
            for group, has in zip(self._groups, present, strict=True)
            if group.window is not None
        ):
            end -= self.alignment
        return max(end, first)

    @staticmethod
    def _has_window(group: Group, has: Sequence[bool], first: int, end: int) -> bool:
        return all(block < len(has) and has[block] for block in range(*_needed(group, first, end)))

    def needed(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The blocks of a load of the tokens from `first` to `end`, as (group's position, block's
        index in the prompt), group after group."""
        for position, group in enumerate(self._groups):
            for block in range(*_needed(group, first, end)):
                yield position, block


def either(left: Sequence[Sequence[bool]], right: Sequence[Sequence[bool]]) -> list[list[bool]]:
    """For each group, which blocks are in one place or the other.

    >>> either([[True], []], [[False, True], [False]])
    [[True, True], [False]]
    """
    return [
        [a or b for a, b in itertools.zip_longest(*both, fillvalue=False)]
        for both in zip(left, right, strict=True)
    ]


def _needed(group: Group, first: int, end: int) -> tuple[int, int]:
    start = max(first // group.block_size, group.first_needed(end))
    return start, end // group.block_size
