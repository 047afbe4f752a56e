"""Splits of KV memory, against numbers worked out by hand and against every other split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plan import split
from penstock.plan.split import Room

GIB = 1 << 30
PAGE = 64 << 10
"""Bytes of a layer's part of a block: 64 tokens, 4 heads of 64, key and value, 16 bit."""


def test_the_pull_requests_first_shape() -> None:
    """6 and 2 layers, 1 GiB a rank: 174,720 tokens become 262,144 (blocks of 64)."""
    need = [6 * PAGE, 2 * PAGE]
    before = split.uniform(need, [GIB, GIB])
    assert before.blocks == 2730
    assert before.blocks * 64 == 174_720
    assert before.used == (2730 * 6 * PAGE, 2730 * 2 * PAGE)
    assert before.idle == (GIB - 2730 * 6 * PAGE, GIB - 2730 * 2 * PAGE)
    after = split.proportional(need, 2 * GIB)
    assert after.blocks == 4096
    assert after.blocks * 64 == 262_144
    assert after.given == (3 * GIB // 2, GIB // 2)
    assert after.idle == (0, 0)


@pytest.mark.parametrize(
    ("first", "second", "saved"), [(48, 16, 1 / 3), (56, 8, 3 / 7)], ids=["48/16", "56/8"]
)
def test_equal_concurrency_takes_the_sum_of_what_ranks_need(
    first: int, second: int, saved: float
) -> None:
    """At equal tokens a uniform split needs twice the larger rank, a proportional one the sum."""
    need = [first * PAGE, second * PAGE]
    blocks = 1000
    uniform = split.uniform(need, [blocks * first * PAGE] * 2)
    exact = split.of_blocks(need, blocks)
    assert uniform.blocks == exact.blocks == blocks
    assert sum(exact.given) == blocks * 64 * PAGE
    assert exact.idle == (0, 0)
    assert 1 - sum(exact.given) / sum(uniform.given) == pytest.approx(saved)


@pytest.mark.parametrize(("first", "gain"), [(48, 1.5), (56, 1.75)], ids=["48/16", "56/8"])
def test_equal_memory_holds_more_tokens(first: int, gain: float) -> None:
    need = [first * PAGE, (64 - first) * PAGE]
    memory = 336 * PAGE * 100
    before = split.uniform(need, [memory] * 2)
    after = split.proportional(need, 2 * memory)
    assert after.blocks / before.blocks == gain


def test_equal_stages_on_unequal_devices() -> None:
    """40/40: nothing moves between ranks that need the same; the smaller device decides."""
    need = [40 * PAGE, 40 * PAGE]
    rooms = [Room("a", 100 * 40 * PAGE), Room("b", 60 * 40 * PAGE)]
    found = split.proportional(need, 200 * 40 * PAGE, rooms)
    assert found.blocks == 60
    assert found.given == (60 * 40 * PAGE, 60 * 40 * PAGE)


def test_three_ranks_one_without_kv() -> None:
    need = [10, 0, 30]
    found = split.proportional(need, 4000)
    assert found.given == (1000, 0, 3000)
    assert split.uniform(need, [500, 500, 600]).blocks == 20


def test_ranks_of_one_device_share_it() -> None:
    need = [30, 10]
    rooms = [Room("host", 2000), Room("host", 2000)]
    assert split.proportional(need, 4000, rooms).blocks == 50
    with pytest.raises(ConfigError, match=r"rank 0, 1 needs 2,040 bytes .* has 2,000 free"):
        split.check_rooms(split.of_blocks(need, 51), rooms)
    split.check_rooms(split.of_blocks(need, 50), rooms)


def test_no_room_for_a_block() -> None:
    with pytest.raises(ConfigError, match="no room for one block of KV: it takes 30, 10"):
        split.proportional([30, 10], 39)
    with pytest.raises(ConfigError, match="4,000 in all, the devices 29, 100"):
        split.proportional([30, 10], 4000, [Room("a", 29), Room("b", 100)])
    assert split.uniform([30, 10], [29, 100]).blocks == 0
    with pytest.raises(ConfigError, match="nothing to plan"):
        split.proportional([0, 0], 100)


needs = st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any)


@given(needs, st.data())
def test_no_split_of_the_same_total_holds_more(need: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(sum(need), 10_000))
    cuts = sorted(
        data.draw(st.lists(st.integers(0, total), min_size=len(need) - 1, max_size=len(need) - 1))
    )
    other = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    held = min(have // n for n, have in zip(need, other, strict=True) if n)
    found = split.proportional(need, total)
    assert found.blocks >= held
    assert sum(found.given) <= total
    assert found.idle == (0,) * len(need)
    # What is left would not make another block.
    assert total - sum(found.given) < sum(need)
