"""Prompts that vLLM holds back in most steps (``--prefill-schedule-interval``): what computing one
takes has what it waits for its next step."""

from __future__ import annotations

import pytest

from penstock._native import Reach
from penstock.vllm.messages import WorkerReport
from tests.clock import Clock
from tests.connector.engine import PlainEngine
from tests.connector.test_scheduler import FULL

STEPS, TOKENS = 4, 64


def test_a_step_counts_from_the_end_of_one_that_somebody_saw(clock: Clock) -> None:
    engine = PlainEngine([FULL], policy="auto", holds_prompts=True)
    clock.now += 1_000_000.0
    prompt = list(range(3 * TOKENS + 1))
    engine.match(engine.ask("a", prompt))
    # The first output is lost.
    engine.step({"a": TOKENS})
    for _ in range(2):
        orders = engine.step({"a": TOKENS})
        clock.now += 1.0
        engine.half.on_worker_output(WorkerReport(steps={orders.step}), (), ())
    seconds = engine.half._advisor.advise(0, [Reach(TOKENS, 0, 1)], TOKENS).recompute
    assert seconds == pytest.approx(1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "penstock.vllm.scheduler.half")


def learned(clock: Clock, *, holds_prompts: bool) -> float:
    """Expected seconds for a prompt of four steps. Each took a second, and so did each of three
    steps between them that computed only an answer."""
    engine = PlainEngine([FULL], policy="auto", holds_prompts=holds_prompts)
    answered = engine.ask("answered", [7])
    engine.match(answered)
    engine.step({"answered": 1})
    clock.now += 1_000.0
    engine.half.on_worker_output(WorkerReport(steps={engine.orders[-1].step}), (), ())
    for number in range(5):
        prompt = [1_000 * (number + 1) + token for token in range(STEPS * TOKENS + 1)]
        engine.match(engine.ask(str(number), prompt))
        for _ in range(STEPS):
            for _ in range(3):
                engine.step({"answered": 1})
                clock.now += 1.0
                engine.half.on_worker_output(None, (), ())
            orders = engine.step({str(number): TOKENS})
            assert orders.step
            clock.now += 1.0
            engine.half.on_worker_output(WorkerReport(steps={orders.step}), (), ())
    reach = Reach(STEPS * TOKENS, 0, 1)
    seconds = engine.half._advisor.advise(0, [reach], STEPS * TOKENS).recompute
    assert seconds is not None
    return seconds


def test_what_a_prompt_waits_for_its_next_step_counts(clock: Clock) -> None:
    assert learned(clock, holds_prompts=False) == pytest.approx(STEPS, rel=0.2)
    # The first of its steps is not waited for any longer than after a load.
    assert learned(clock, holds_prompts=True) == pytest.approx(STEPS + 3 * (STEPS - 1), rel=0.2)
