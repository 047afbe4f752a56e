"""How long loads take, over what the load policy had expected: counted for those it has weighed."""

from __future__ import annotations

import pytest

from tests.clock import Clock
from tests.connector.engine import PlainEngine
from tests.connector.test_scheduler import FULL, PROMPT


def loads(policy: str, clock: Clock) -> dict[str, object]:
    """What an engine counts that loads two prompts, one after the other. Computing takes a second
    for each token, so that no load seems too slow."""
    engine = PlainEngine([FULL], policy=policy)
    engine.half._advisor.on_step(clock.now, 1_000, 1_000, 500_500)
    clock.now += 1_000.0
    engine.half._advisor.on_output(clock.now, [1_000])
    for name, first in (("one", 0), ("two", 1_000)):
        prompt = [first + token for token in PROMPT]
        engine.put_prompt(prompt)
        request = engine.ask(name, prompt)
        assert engine.match(request) == 20
        engine.load(request, 0, 20)
        engine.step({})
        engine.settle()
    counts = engine.half.take_counts()
    assert counts is not None
    seconds = counts["load_seconds/pool"]
    assert isinstance(seconds, list)
    assert len(seconds) == 2
    return dict(counts)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that the load policy goes by."""
    return Clock(
        monkeypatch,
        *(f"penstock.vllm.scheduler.{name}" for name in ("half", "probing", "transfers")),
    )


def test_a_load_is_compared_with_what_was_expected_of_it(clock: Clock) -> None:
    ratios = loads("auto", clock)["load_to_expected_ratio"]
    assert isinstance(ratios, list)
    # Of the first one nothing is expected: the pool is not known.
    assert len(ratios) == 1
    assert ratios[0] > 0


def test_of_what_is_loaded_always_nothing_is_expected(clock: Clock) -> None:
    assert "load_to_expected_ratio" not in loads("always", clock)
