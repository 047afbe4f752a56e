"""Waits of tests whose engine must have brought something into the pool before they go on.

Their limits only keep a test from hanging.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.e2e.conftest import BLOCK
from tests.e2e.node import Node

LIMIT = 240.0


def until(is_so: Callable[[], bool], node: Node) -> None:
    """Waits until something is so. Asks the engine nothing: it must have work of its own."""
    end = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < end, node.counters()
        time.sleep(0.02)


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
    end, seen = time.monotonic() + LIMIT, 0.0
    while (counts := _counted(node, since))["stored_blocks"] < blocks:
        assert time.monotonic() < end, counts
        lost = counts["stores_failed"] + counts["stores_dropped"]
        if lost == seen:
            # An idle engine reports with its next step.
            node.ask([7, 8, 9], max_tokens=2)
            time.sleep(0.05)
            continue
        seen = lost
        for prompt in prompts:
            for length in range(BLOCK, len(prompt) + 1, BLOCK):
                node.ask([*prompt[:length], 3], max_tokens=1, **options)


def all_tried(node: Node, blocks: int) -> None:
    """Waits until so many blocks were stored, or could not be: host memory has them either way."""
    end = time.monotonic() + LIMIT
    while sum((counts := _counted(node)).values()) < blocks:
        assert time.monotonic() < end, counts
        node.ask([7, 8, 9], max_tokens=2)
        time.sleep(0.05)


def _counted(node: Node, since: dict[str, float] | None = None) -> dict[str, float]:
    """What became of blocks, since then."""
    counters, before = node.counters(), since or {}
    names = ("stored_blocks", "stores_failed", "stores_dropped")
    return {name: counters.get(name, 0) - before.get(name, 0) for name in names}
