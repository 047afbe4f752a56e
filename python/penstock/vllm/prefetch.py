"""Prefetches: what waiting requests will load, on its way into host memory or kept there for them.

A probe is one that nobody waits for: it measures the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class _Prefetch:
    names: tuple[bytes, ...]
    ranks: int
    """That are not done with it yet."""
    is_probe: bool
    is_released: bool = False


class Prefetches:
    """Those of one engine that some rank has yet to do, or whose blocks are kept for a request."""

    def __init__(self) -> None:
        self._open: dict[int, _Prefetch] = {}
        self._released: list[int] = []
        self._names: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Blocks that are kept for somebody, or on their way."""
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        """Whether a block is on its way, or kept: no other prefetch needs to fetch it."""
        return name in self._names

    def begin(
        self, number: int, names: Sequence[bytes], ranks: int, *, is_probe: bool = False
    ) -> None:
        """One is ordered, of blocks of which none is in another, from so many ranks."""
        self._open[number] = _Prefetch(tuple(names), ranks, is_probe)
        self._names.update(dict.fromkeys(names, number))

    def on_done(self, number: int, ranks: int) -> bool:
        """So many ranks are done with it; whether all are."""
        prefetch = self._open[number]
        prefetch.ranks -= ranks
        if prefetch.ranks:
            return False
        if prefetch.is_released:
            del self._open[number]
        elif prefetch.is_probe:
            self.release(number)
        return True

    def release(self, number: int) -> None:
        """Nobody waits for it any more."""
        prefetch = self._open[number]
        prefetch.is_released = True
        for name in prefetch.names:
            del self._names[name]
        self._released.append(number)
        if not prefetch.ranks:
            del self._open[number]

    def take_released(self) -> list[int]:
        """Those released since the last call."""
        released, self._released = self._released, []
        return released
