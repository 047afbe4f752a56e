"""What a pool saves in money, against values that were worked out by hand."""

from __future__ import annotations

import pytest

from penstock.sim import Load, Prices, Saving, break_even_bytes, saving

GIB = 1 << 30
PRICES = Prices(gpu_hour=2.0, pool_gib_month=0.5, network_gib=0.001, gpus_per_node=4)
LOAD = Load(computed_tokens=72_000_000, seconds=3600.0, prefill_speed=10_000.0)
"""7,200 seconds of a node in an hour: two nodes, eight GPUs."""


def test_a_pool_that_saves_a_quarter_of_prefill() -> None:
    found = saving(
        LOAD, PRICES, pool_bytes=1000 * GIB, computed_tokens=54_000_000, moved_bytes=100 * GIB
    )
    assert found.prefill_share == 0.25
    # 18 million tokens at 10,000 a second: 1,800 seconds of four GPUs.
    assert found.gpu_seconds == pytest.approx(7200)
    assert found.gpus == pytest.approx(2)
    assert found.gpu_money == pytest.approx(2 * 730 * 2.0)
    assert found.pool_money == pytest.approx(500)
    # 100 GiB an hour.
    assert found.network_money == pytest.approx(100 * 730 * 0.001)
    assert found.net == pytest.approx(2920 - 500 - 73)
    assert found.break_even_price == pytest.approx((2920 - 73) / 1000)


def test_a_pool_that_saves_nothing_still_costs() -> None:
    found = saving(
        LOAD, PRICES, pool_bytes=10 * GIB, computed_tokens=LOAD.computed_tokens, moved_bytes=0
    )
    assert (found.prefill_share, found.gpus, found.gpu_money) == (0, 0, 0)
    assert found.net == -5
    assert found.break_even_price == 0


def test_a_pool_that_makes_nodes_compute_more_loses_that_too() -> None:
    found = saving(LOAD, PRICES, pool_bytes=GIB, computed_tokens=73_000_000, moved_bytes=0)
    assert found.prefill_share < 0
    assert found.net < -0.5


def of(gib: float, net: float) -> Saving:
    """A pool that leaves so much."""
    return Saving(int(gib * GIB), 0.1, 1.0, 1.0, gpu_money=net, pool_money=0, network_money=0)


def test_break_even_lies_where_the_last_gain_turns_into_a_loss() -> None:
    sizes = [of(1, -5), of(2, 10), of(4, 30), of(8, -10), of(16, -90)]
    assert break_even_bytes(sizes) == 7 * GIB
    assert break_even_bytes([of(1, -5), of(2, 0), of(4, -8)]) == 2 * GIB


@pytest.mark.parametrize("nets", [[5, 10, 0], [-1, -2, -3], []])
def test_there_is_no_break_even_if_all_pay_or_none_does(nets: list[float]) -> None:
    assert break_even_bytes([of(n + 1, net) for n, net in enumerate(nets)]) is None
