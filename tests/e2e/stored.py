"""Waits of tests whose engine must have brought something into the pool before they go on."""

from __future__ import annotations

from tests.e2e.conftest import BLOCK
from tests.e2e.node import Node
from tests.waiting import LIMIT, eventually


def all_stored(node: Node, blocks: int, since: dict[str, float] | None = None) -> None:
    """Waits until the pool has so many blocks more than were counted `since`, or than none.

    The blocks are those that the test's own requests computed. An engine that computes a prompt
    again after a hit computes it in other pieces, and rounds otherwise: such blocks would give the
    same tokens, but not the same bits.

    Raises:
        AssertionError: a block was lost, and will not come.
    """
    report = _Reports(node)

    def are_stored() -> bool:
        counts = _counted(node, since)
        if counts["stored_blocks"] >= blocks:
            return True
        assert counts["stores_failed"] == counts["stores_dropped"] == 0, counts
        report.wait()
        return False

    eventually(are_stored, lambda: _counted(node, since), seconds=2 * LIMIT, pause=0.05)


def stored_in_the_end(
    node: Node, prompts: list[list[int]], blocks: int, since: dict[str, float] | None = None
) -> None:
    """The same for an engine that may lose blocks: they are computed and stored again, and may
    differ in rounding.

    An engine that is short of KV memory gives up a block that waits to be read, if it needs the
    memory. Of a window such a block is not stored by chance later, as requests hold their last
    window only. So each is stored with a request that ends behind it.
    """
    report, seen = _Reports(node), 0.0

    def are_stored() -> bool:
        nonlocal seen
        counts = _counted(node, since)
        if counts["stored_blocks"] >= blocks:
            return True
        lost = counts["stores_failed"] + counts["stores_dropped"]
        if lost == seen:
            report.wait()
            return False
        seen = lost
        for prompt in prompts:
            for length in range(BLOCK, len(prompt) + 1, BLOCK):
                node.ask([*prompt[:length], 3], max_tokens=1)
        return False

    eventually(are_stored, lambda: _counted(node, since), seconds=2 * LIMIT, pause=0.05)


def all_tried(node: Node, blocks: int) -> None:
    """Waits until so many blocks were stored, or could not be: host memory has them either way."""
    report = _Reports(node)

    def are_tried() -> bool:
        if sum(_counted(node).values()) >= blocks:
            return True
        report.wait()
        return False

    eventually(are_tried, lambda: _counted(node), seconds=2 * LIMIT, pause=0.05)


class _Reports:
    """Steps of an idle engine, which reports what was stored with its next step only.

    Each step takes a free block. So many of them in a row would take even those that have left a
    window and were not read yet, and these would be lost. So there is one at the first look, and
    at the second, the fourth, the eighth.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._looks = 0

    def wait(self) -> None:
        self._looks += 1
        if self._looks.bit_count() == 1:
            self._node.ask([7, 8, 9], max_tokens=2)


def _counted(node: Node, since: dict[str, float] | None = None) -> dict[str, float]:
    """What became of blocks, since then."""
    counters, before = node.counters(), since or {}
    names = ("stored_blocks", "stores_failed", "stores_dropped")
    return {name: counters.get(name, 0) - before.get(name, 0) for name in names}
