"""How far a prompt can be restored from a pool, for SGLang's hybrid models.

A page of such a model has a part in each of several host pools. SGLang says of each side pool which
of its pages a prefix needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"
"""SGLang's names of the policies that can shorten a hit."""


@dataclass(frozen=True)
class SidePool:
    """What is there of one side pool, and what a prefix needs of it."""

    name: str
    policy: str
    there: Sequence[bool]
    """For each page of the prompt, whether the store has this pool's part."""
    trailing: int = 1
    """With :data:`TRAILING_PAGES`: the pages at a prefix's end that must be there."""


@dataclass(frozen=True)
class Reach:
    """How far a prompt can be restored."""

    pages: int
    """The longest prefix that can be restored, in pages."""
    by_pool: dict[str, int]
    """Side pool → the longest prefix that this pool allows. Pools that allow none are left out, and
    pools whose policy does not shorten a hit."""
    possible: list[int]
    """Every prefix that can be restored, in pages, the shortest first."""


def leading(there: Sequence[bool]) -> int:
    """The number of leading pages that are there."""
    return next((place for place, is_there in enumerate(there) if not is_there), len(there))


def reach(kv_pages: int, side_pools: Sequence[SidePool]) -> Reach:
    """How far a prompt can be restored of which the first `kv_pages` pages have their KV."""
    possible = list(range(1, kv_pages + 1))
    by_pool: dict[str, int] = {}
    for pool in side_pools:
        if pool.policy == ALL_PAGES:
            ends = set(range(1, leading(pool.there[:kv_pages]) + 1))
        elif pool.policy == TRAILING_PAGES:
            ends = _window_ends(pool.there[:kv_pages], max(1, pool.trailing))
        else:
            continue
        if ends:
            by_pool[pool.name] = max(ends)
        possible = [pages for pages in possible if pages in ends]
    return Reach(possible[-1] if possible else 0, by_pool, possible)


def _window_ends(there: Sequence[bool], window: int) -> set[int]:
    """The prefixes whose last `window` pages are there."""
    ends, run = set(), 0
    for pages, is_there in enumerate(there, start=1):
        run = run + 1 if is_there else 0
        if run >= min(window, pages):
            ends.add(pages)
    return ends
