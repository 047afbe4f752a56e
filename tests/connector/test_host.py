"""The engine's host memory, split over its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.layout.geometry import Geometry
from penstock.vllm.host import Slots, host_blocks, stage_slots

PAGE_BYTES = 4096
"""Slots begin on pages."""

WHOLE = Geometry(None, None, None)


def test_a_share_in_one_object() -> None:
    # 6 layers of 64 KiB, a header, to the next page.
    six = stage_slots((0, 6), (0, 8), 64 << 10, WHOLE)
    two = stage_slots((6, 8), (0, 8), 64 << 10, WHOLE)
    assert six == Slots(1, 6 * 64 << 10)
    assert six.bytes_per_block == 6 * (64 << 10) + PAGE_BYTES
    assert two.bytes_per_block == 2 * (64 << 10) + PAGE_BYTES
    # 1 GiB // (8 * 64 KiB + 2 pages)
    assert host_blocks(1 << 30, [six, two]) == 2016


def test_a_share_in_portable_objects() -> None:
    portable = stage_slots((0, 6), (4, 8), 64 << 10, Geometry(2, 1, "HNC"))
    assert portable == Slots(3 * 4, 2 * (64 << 10) // 4)


def test_a_stage_that_holds_nothing() -> None:
    nothing = stage_slots((8, 8), (0, 8), 64 << 10, WHOLE)
    assert nothing.bytes_per_block == 0
    assert host_blocks(1 << 20, [stage_slots((0, 8), (0, 8), 1 << 10, WHOLE), nothing]) == 85


def test_too_little_names_what_a_block_takes() -> None:
    with pytest.raises(ConfigError, match=r"4,096 bytes of host memory.*12,288, 8,192 bytes"):
        host_blocks(4096, [Slots(1, 9000), Slots(1, 5000)])


@given(
    st.lists(st.builds(Slots, st.integers(1, 40), st.integers(1, 1 << 22)), min_size=1, max_size=8),
    st.integers(1, 1000),
    st.integers(0, PAGE_BYTES - 1),
)
def test_all_ranks_hold_as_many_within_the_budget(
    ranks: list[Slots], blocks: int, more: int
) -> None:
    need = sum(rank.bytes_per_block for rank in ranks)
    held = host_blocks(blocks * need + more, ranks)
    assert held == blocks
    assert need * held <= blocks * need + more < need * (held + 1)
