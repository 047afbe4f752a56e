"""What loads save, and what requests wait for them: sums of given times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.vllm.advisor import Advisor, attended
from penstock.vllm.counters import Counters
from penstock.vllm.scheduler import savings
from penstock.vllm.scheduler.savings import Savings

PROMPT = 1_000


class Engine:
    """An engine that computes when the test says so, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.advisor, self.counters = Advisor(2048), Counters()
        self.savings = Savings(self.advisor, self.counters)
        self._steps = 0
        monkeypatch.setattr(savings, "time", SimpleNamespace(monotonic=lambda: self.now))

    def compute(self, tokens: int, seconds: float) -> None:
        """A step that computes the last tokens of a prompt."""
        self._steps += 1
        pairs = attended(PROMPT - tokens, PROMPT)
        self.advisor.on_step(self.now, self._steps, tokens, pairs)
        self.now += seconds
        self.advisor.on_output(self.now, [self._steps])

    def ask(self, tenant: str) -> Any:
        """A request, as far as it is needed here."""
        request = SimpleNamespace(num_tokens=PROMPT)
        return SimpleNamespace(label=tenant, request=request, waits_since=None, span=None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_a_load_saves_what_its_tokens_take_in_the_engines_own_steps(engine: Engine) -> None:
    red, blue = engine.ask("red"), engine.ask("blue")
    engine.savings.on_loaded(red, 0, 750)
    engine.savings.on_loaded(blue, 0, 500)
    # A short step says too little of what a prompt takes.
    engine.compute(100, 0.4)
    engine.savings.on_loaded(red, 0, 250)
    assert engine.counters.take() is None
    for _ in range(3):
        engine.compute(PROMPT, 2.0)
        # What the engine does between steps is not in it.
        engine.now += 60.0
    engine.savings.on_loaded(blue, 0, 250)
    counts = engine.counters.take()
    assert counts is not None
    saved = {}
    for end in (250, 500, 750, PROMPT):
        seconds = engine.advisor.saved_seconds(0, end, PROMPT)
        assert seconds is not None
        saved[end] = seconds
        # A later token attends to more than an earlier one, at most to twice the mean.
        assert seconds == pytest.approx(2.0 * end / PROMPT, rel=0.6)
    assert saved[PROMPT] == pytest.approx(2.0, rel=0.01)
    assert counts["prefill_saved_seconds/red"] == pytest.approx(saved[750] + saved[250])
    assert counts["prefill_saved_seconds/blue"] == pytest.approx(saved[500] + saved[250])
    assert len(counts) == 2


def test_what_requests_wait_is_summed_for_their_tenants(engine: Engine) -> None:
    red, blue = engine.ask("red"), engine.ask("blue")
    engine.savings.begin_wait(red)
    engine.now += 0.25
    engine.savings.begin_wait(blue)
    # It waits already.
    engine.savings.begin_wait(red)
    engine.now += 0.5
    engine.savings.end_wait(red)
    engine.now += 1.0
    engine.savings.end_wait(blue)
    # They wait no more.
    engine.savings.end_wait(red)
    engine.savings.begin_wait(red)
    engine.now += 2.0
    engine.savings.end_wait(red)
    counts = engine.counters.take()
    assert counts is not None
    assert counts["load_wait_seconds/red"] == pytest.approx(0.75 + 2.0)
    assert counts["load_wait_seconds/blue"] == pytest.approx(1.5)
    assert len(counts) == 2
