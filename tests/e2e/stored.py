"""Waits of tests whose engine must have brought something into the pool before they go on."""

from __future__ import annotations

from typing import Any

from tests.e2e.conftest import BLOCK
from tests.e2e.node import Node
from tests.waiting import LIMIT, eventually


def all_stored(
    node: Node,
    prompts: list[list[int]],
    blocks: int,
    since: dict[str, float] | None = None,
    **options: Any,
) -> None:
    """Waits until the pool has so many blocks more than were counted `since`, or than none: all of
    these prompts, which were asked with these options.

    A put has five seconds, on a thread that gives way to all others, and a block waits a tenth of a
    second for room in host memory. On a busy machine this may not be enough: blocks are counted as
    failed or dropped. Of a window such a block is not stored by chance later, as requests hold
    their last window only. So it is stored again here, with the request that ends behind it.
    """
    seen = 0.0

    def are_stored() -> bool:
        nonlocal seen
        counts = _counted(node, since)
        if counts["stored_blocks"] >= blocks:
            return True
        lost = counts["stores_failed"] + counts["stores_dropped"]
        if lost == seen:
            # An idle engine reports with its next step.
            node.ask([7, 8, 9], max_tokens=2)
            return False
        seen = lost
        for prompt in prompts:
            for length in range(BLOCK, len(prompt) + 1, BLOCK):
                node.ask([*prompt[:length], 3], max_tokens=1, **options)
        return False

    eventually(are_stored, lambda: _counted(node, since), seconds=2 * LIMIT, pause=0.05)


def all_tried(node: Node, blocks: int) -> None:
    """Waits until so many blocks were stored, or could not be: host memory has them either way."""

    def are_tried() -> bool:
        if sum(_counted(node).values()) >= blocks:
            return True
        node.ask([7, 8, 9], max_tokens=2)
        return False

    eventually(are_tried, lambda: _counted(node), seconds=2 * LIMIT, pause=0.05)


def _counted(node: Node, since: dict[str, float] | None = None) -> dict[str, float]:
    """What became of blocks, since then."""
    counters, before = node.counters(), since or {}
    names = ("stored_blocks", "stores_failed", "stores_dropped")
    return {name: counters.get(name, 0) - before.get(name, 0) for name in names}
