"""What loads and recomputation are expected to take, and the choice between them."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.vllm.costs import Choice, Fit, Prefill, Tier, attended, choose, patience


def test_pairs_are_counted_one_by_one() -> None:
    assert attended(5, 9) == sum(range(6, 10))


@given(
    st.floats(0.001, 1),
    st.floats(1e-6, 1e-3),
    st.floats(1e-9, 1e-7),
)
def test_a_fit_finds_what_made_the_times(step: float, token: float, pair: float) -> None:
    fit = Fit(3, 0.9)
    for tokens in (100, 700, 1500, 2000, 300, 1100, 50, 1900):
        pairs = attended(0, tokens)
        fit.observe((1, tokens, pairs), step + token * tokens + pair * pairs, tokens)
    for tokens in (200, 1000, 1800):
        pairs = attended(0, tokens)
        expected = step + token * tokens + pair * pairs
        assert fit.predict((1, tokens, pairs)) == pytest.approx(expected, rel=0.05)


def test_a_fit_to_one_kind_of_step_predicts_that_kind() -> None:
    fit = Fit(3, 0.9)
    for _ in range(20):
        fit.observe((1, 512, attended(0, 512)), 0.25, 512)
    assert fit.predict((1, 512, attended(0, 512))) == pytest.approx(0.25, rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(1e-6, 100)), min_size=1, max_size=50))
def test_no_time_is_negative_and_more_bytes_take_no_less(loads: list[tuple[int, float]]) -> None:
    tier = Tier()
    for num_bytes, seconds in loads:
        tier.observe(num_bytes, seconds)
    times = [tier.seconds(n) for n in (0, 1000, 10**6, 10**9)]
    assert all(time is not None and time >= 0 for time in times)
    assert times == sorted(times, key=lambda time: time or 0)


def test_a_fit_forgets() -> None:
    tier = Tier()
    for _ in range(30):
        tier.observe(1 << 20, 0.001)
    for _ in range(8):
        tier.observe(1 << 20, 0.5)
    assert tier.seconds(1 << 20) == pytest.approx(0.5, rel=0.1)


def test_loads_under_way_come_first() -> None:
    tier = Tier()
    for size in (1 << 20, 4 << 20, 16 << 20):
        tier.observe(size, 0.01 + size / (100 << 20))
    alone = tier.seconds(1 << 20)
    assert alone == pytest.approx(0.02, rel=0.05)
    assert tier.begin(50 << 20) == 50 << 20
    assert tier.seconds(1 << 20) == pytest.approx(0.52, rel=0.05)
    tier.end(50 << 20)
    assert tier.seconds(1 << 20) == pytest.approx(0.02, rel=0.05)


def test_what_is_doubted_is_not_loaded() -> None:
    tier = Tier()
    tier.observe(1 << 20, 0.01)
    tier.doubt()
    assert tier.seconds(1 << 20) == math.inf
    assert choose(0, [(512, tier.seconds(1 << 20))], 600, prefill(0.001)).end == 0
    tier.observe(1 << 20, 0.02)
    assert tier.seconds(1 << 20) == pytest.approx(0.02)


def test_a_tier_that_became_far_faster_is_known_at_once() -> None:
    tier = Tier()
    for _ in range(30):
        tier.observe(8 << 20, 8.0)
    tier.observe(1 << 20, 0.01)
    assert tier.seconds(8 << 20) == pytest.approx(0.08)


def test_a_tier_that_became_slower_is_not_taken_for_one_with_latency() -> None:
    """A probe before and one of half the size after took as long: nothing would follow of more."""
    tier = Tier()
    for _ in range(3):
        tier.observe(4 << 20, 0.1)
        tier.observe(8 << 20, 0.2)
    tier.observe(4 << 20, 0.2)
    assert tier.seconds(24 << 20) == pytest.approx(1.2)


def test_times_that_vary_are_no_change() -> None:
    tier, rng = Tier(), random.Random(2)
    for _ in range(200):
        tier.observe(8 << 20, rng.choice((0.1, 0.3)))
    before = tier.seconds(8 << 20)
    tier.observe(8 << 20, 0.4)
    assert before is not None
    assert tier.seconds(8 << 20) == pytest.approx((before + 0.4) / 2, rel=0.05)


def test_deviation_follows_the_errors() -> None:
    tier, rng = Tier(), random.Random(1)
    for _ in range(200):
        tier.observe(1 << 20, 0.1 + rng.choice((-0.02, 0.02)))
    assert 0.005 < tier.deviation < 0.05


def prefill(seconds_per_token: float, seconds_per_pair: float = 0.0) -> Prefill:
    made = Prefill(2048)
    for tokens in (100, 500, 1000, 1500, 2000):
        pairs = attended(0, tokens)
        made.observe(tokens, pairs, tokens * seconds_per_token + pairs * seconds_per_pair)
    return made


def test_what_is_not_known_is_found_out_by_loading() -> None:
    assert choose(0, [(512, None)], 600, prefill(0.001)).end == 512
    assert choose(0, [(512, 99.0)], 600, Prefill(2048)).end == 512


def test_a_slow_tier_is_left_out_and_a_near_one_is_not() -> None:
    per_token = prefill(0.001)
    assert choose(0, [(512, 0.01), (1024, 2.0)], 1100, per_token).end == 512
    assert choose(0, [(512, 0.01), (1024, 0.1)], 1100, per_token).end == 1024
    assert choose(256, [(512, 0.5), (1024, 2.0)], 1100, per_token).end == 256


@given(
    per_token=st.floats(1e-5, 1e-2),
    per_pair=st.floats(0, 1e-6),
    latency=st.floats(0, 1),
    per_loaded=st.floats(1e-6, 1e-2),
    blocks=st.integers(1, 60),
)
def test_no_end_in_between_is_better(
    per_token: float, per_pair: float, latency: float, per_loaded: float, blocks: int
) -> None:
    """Against trying every block."""
    prompt, compute = blocks * 16 + 5, prefill(per_token, per_pair)
    alone = compute.seconds(0, prompt)
    assert alone is not None
    assume(alone > 0)

    def total(end: int) -> float:
        rest = compute.seconds(end, prompt)
        assert rest is not None
        return rest + (latency + per_loaded * end if end else 0.0)

    end = blocks * 16
    chosen = choose(0, [(end, latency + per_loaded * end)], prompt, compute).end
    assert total(chosen) <= min(total(n * 16) for n in range(blocks + 1)) * (1 + 1e-3)


def test_patience_is_for_the_first_of_a_load() -> None:
    assert patience(Choice(100, None, None), None, 0.0) is None
    assert patience(Choice(100, 0.2, None), 0.1, 0.0) is None
    assert patience(Choice(100, None, 4.0), None, 0.0) == pytest.approx(0.5)
    sure = patience(Choice(100, 2.8, 3.0), 0.1, 0.0)
    assert sure is not None
    assert sure == pytest.approx(0.1 + 0.03 * 3.0)
    assert patience(Choice(100, 2.8, 3.0), 0.1, 0.01) == pytest.approx(sure + 0.04)
    assert patience(Choice(100, 2.8, 3.0), 0.1, 99.0) == pytest.approx(sure + 0.75)


def test_a_load_that_saves_much_is_worth_waiting_for() -> None:
    assert patience(Choice(100, 0.2, 3.0), 0.1, 0.0) == pytest.approx(0.1 + 2.8 / 8)
    # No less than one of which nothing is known, nor than its own unsteadiness asks for.
    assert patience(Choice(100, 0.0, 3.0), 0.0, 0.0) == patience(Choice(100, None, 3.0), None, 0.0)
    assert patience(Choice(100, 0.2, 3.0), 0.1, 0.1) == pytest.approx(0.1 + 0.09 + 0.4)
