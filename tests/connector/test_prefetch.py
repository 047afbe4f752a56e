"""Which prefetches are open, and which blocks they keep."""

from __future__ import annotations

import pytest

from penstock.vllm.host import HeldParts, HostIndex
from penstock.vllm.prefetch import Prefetches


def test_a_prefetch_keeps_its_blocks_until_it_is_released() -> None:
    open_ones = Prefetches()
    open_ones.begin(1, [b"a", b"b"], ranks=2)
    assert len(open_ones) == 2
    assert b"a" in open_ones
    assert not open_ones.on_done(1, 1)
    assert open_ones.on_done(1, 1)
    assert len(open_ones) == 2
    open_ones.release(1)
    assert len(open_ones) == 0
    assert open_ones.take_released() == [1]
    assert open_ones.take_released() == []
    with pytest.raises(KeyError):
        open_ones.release(1)


def test_one_that_is_released_early_is_known_until_all_ranks_are_done() -> None:
    open_ones = Prefetches()
    open_ones.begin(1, [b"a"], ranks=2)
    open_ones.release(1)
    assert b"a" not in open_ones
    assert not open_ones.on_done(1, 1)
    assert open_ones.on_done(1, 1)


def test_a_probe_releases_itself() -> None:
    open_ones = Prefetches()
    open_ones.begin(1, [b"a"], ranks=1, is_probe=True)
    assert open_ones.on_done(1, 1)
    assert open_ones.take_released() == [1]
    assert len(open_ones) == 0


def test_a_block_is_held_when_all_its_objects_on_all_ranks_are() -> None:
    index = HostIndex()
    index.expect([2, 1])
    ranks = [HeldParts([2, 1]), HeldParts([3, 1])]

    def come(rank: int, group: int, times: int, came: bool = True) -> None:
        for _ in range(times):
            index.update({b"x": ranks[rank].update(group, b"x", came)})

    come(0, 0, 2)
    come(1, 0, 2)
    assert not index.has(0, b"x")
    come(1, 0, 1)
    assert index.has(0, b"x")
    come(0, 0, 1, came=False)
    assert not index.has(0, b"x")
    come(0, 0, 1, came=False)
    come(0, 0, 2)
    assert index.has(0, b"x")
    for rank, objects in ((0, 2), (1, 3)):
        come(rank, 0, objects, came=False)
    assert not index.has(0, b"x")
