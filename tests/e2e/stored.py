"""Waits of tests whose engine must have brought something into the pool before they go on."""

from __future__ import annotations

from lab.engines.node import Node
from lab.waiting import LIMIT, eventually


def all_stored(node: Node, blocks: int, since: dict[str, float] | None = None) -> None:
    """Waits until the pool has so many blocks more than were counted `since`, or than none.

    The blocks are those that the test's own requests computed. An engine that computes a prompt
    again after a hit computes it in other pieces, and rounds otherwise: such blocks would give the
    same tokens, but not the same bits.

    Raises:
        AssertionError: a block was lost, and will not come.
    """

    def are_stored() -> bool:
        counts = _counted(node, since)
        if counts["stored_blocks"] >= blocks:
            return True
        assert counts["stores_failed"] == counts["stores_dropped"] == 0, counts
        # An idle engine reports with its next step.
        node.ask([7, 8, 9], max_tokens=2)
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
