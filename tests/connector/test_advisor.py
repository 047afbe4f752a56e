"""What an engine watches of itself, and what it advises for that."""

from __future__ import annotations

import pytest

from penstock.vllm.advisor import ALWAYS, AUTO, NEVER, Advisor, Reach
from penstock.vllm.costs import attended

MIB = 1 << 20


def engine(policy: str = AUTO, *, per_token: float = 0.001) -> Advisor:
    """One that has computed some prompts."""
    advisor = Advisor(policy, 2048)
    now = 0.0
    for step, tokens in enumerate((300, 900, 1500, 600)):
        advisor.on_step(now, step, tokens, attended(0, tokens))
        now += 0.01 + tokens * per_token
        advisor.on_output(now, [step])
        now += 5.0
    return advisor


def load(advisor: Advisor, number: int, pool_bytes: int, seconds: float, missing: int = 0) -> None:
    advisor.on_begin(0.0, number, max(1, pool_bytes // MIB), 0, pool_bytes)
    advisor.on_end(number, seconds, missing)


def test_the_first_load_is_tried_for_half_the_recomputation() -> None:
    advisor = engine()
    choice = advisor.advise(0, [Reach(1024, 0, 8 * MIB)], 1100)
    assert choice.end == 1024
    assert advisor.patience(choice) == pytest.approx(1.11 / 2, rel=0.1)


def test_a_slow_pool_is_declined_and_a_fast_one_is_not() -> None:
    advisor, reach = engine(), [Reach(1024, 0, 8 * MIB)]
    load(advisor, 1, 8 * MIB, 4.0)
    assert advisor.advise(0, reach, 1100).end == 0
    for number in range(2, 8):
        load(advisor, number, 4 * MIB, 0.02)
    assert advisor.advise(0, reach, 1100).end == 1024


def test_a_load_that_was_given_up_tells_how_slow_the_pool_is() -> None:
    advisor, reach = engine(), [Reach(1024, 0, 8 * MIB)]
    load(advisor, 1, 8 * MIB, 0.5, missing=7 * MIB)
    assert advisor.advise(0, reach, 1100).end == 0


def test_one_load_is_enough_to_see_that_the_pool_became_slow() -> None:
    advisor, reach = engine(), [Reach(1024, 0, 8 * MIB)]
    for number in range(1, 6):
        load(advisor, number, 8 * MIB, 0.04)
    before = advisor.patience(advisor.advise(0, reach, 1100))
    assert before is not None
    # Slower, but worth it: given up the first time, and not again.
    load(advisor, 6, 8 * MIB, before, missing=8 * MIB)
    choice = advisor.advise(0, reach, 1100)
    assert choice.end == 1024
    after = advisor.patience(choice)
    assert after is not None
    assert after > 2 * before
    # Far slower: left alone.
    load(advisor, 7, 8 * MIB, after, missing=8 * MIB)
    assert advisor.advise(0, reach, 1100).end == 0


def test_host_memory_is_loaded_when_the_pool_is_slow() -> None:
    advisor = engine()
    load(advisor, 1, 8 * MIB, 4.0)
    reaches = [Reach(512, 4 * MIB, 0), Reach(1024, 4 * MIB, 4 * MIB)]
    assert advisor.advise(0, reaches, 1100).end == 512


def test_steps_in_flight_at_once_are_timed_one_after_the_other() -> None:
    advisor = Advisor(AUTO, 2048)
    # Ordered together, as vLLM does when it schedules ahead; each takes a second.
    for step in range(6):
        advisor.on_step(0.0 if step < 2 else step - 1.0, step, 1000, 0)
        if step:
            advisor.on_output(float(step), [step - 1])
    load(advisor, 1, MIB, 0.9)
    assert advisor.advise(0, [Reach(999, 0, MIB)], 1000).end == 999
    load(advisor, 2, MIB, 4.0)
    assert advisor.advise(0, [Reach(999, 0, MIB)], 1000).end == 0


def test_a_pool_that_is_left_alone_is_looked_at_now_and_then() -> None:
    advisor = engine()
    assert advisor.wants_probe(0.0, MIB) == 4
    advisor.on_begin(100.0, 1, 1, 0, MIB)
    advisor.on_end(1, 0.1, 0)
    assert advisor.wants_probe(104.0, MIB) == 0
    assert advisor.wants_probe(106.0, MIB) == 4
    assert advisor.wants_probe(106.0, 100 * MIB) == 1


def test_always_and_never() -> None:
    slow, reach = engine(ALWAYS), [Reach(1024, 0, 8 * MIB)]
    load(slow, 1, 8 * MIB, 99.0)
    choice = slow.advise(0, reach, 1100)
    assert choice.end == 1024
    assert slow.patience(choice) is None
    assert engine(NEVER).advise(16, reach, 1100).end == 16
    assert slow.wants_probe(0.0, MIB) == 0
