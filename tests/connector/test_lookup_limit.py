"""The limit of look-ups: it follows a pool far away, and no request waits longer than it may."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, cast

import pytest

from lab.network import LIMIT, Way
from lab.waiting import eventually
from penstock.vllm.lookup_limit import FIRST, LONGEST, TIMES, LookupLimit
from penstock.vllm.scheduler import lookups
from penstock.vllm.scheduler.requests import RequestState
from penstock.vllm.settings import Settings
from tests.clock import Clock
from tests.connector.engine import Asked, PlainEngine
from tests.connector.test_scheduler import FULL, PROMPT
from tests.servers import Server


def test_it_follows_what_look_ups_take_up_to_a_bound() -> None:
    limit = LookupLimit()
    for took in (0.0, 0.001, FIRST / TIMES):
        assert not limit.note(took)
        assert (limit.seconds, limit.extra) == (FIRST, 0.0)
    assert limit.note(0.24)
    assert limit.seconds == pytest.approx(0.96)
    assert limit.extra == pytest.approx(0.96 - FIRST)
    assert limit.note(100.0)
    assert limit.seconds == LONGEST
    # One that is quick does not make the next one late; many do away with the bound's growth.
    assert not limit.note(0.24)
    assert limit.seconds == LONGEST
    for _ in range(200):
        assert not limit.note(0.001)
    assert limit.seconds == FIRST


def test_what_the_operator_has_set_stays() -> None:
    pool = {"penstock.pool": "memory:"}
    for extra, is_fixed in ((pool, False), (pool | {"penstock.lookup_timeout": FIRST}, True)):
        limit = Settings.parse(extra).lookup_limit(extra)
        assert (limit.is_fixed, limit.seconds) == (is_fixed, FIRST)
        assert limit.note(1.0) != is_fixed
        assert (limit.seconds == FIRST) == is_fixed


def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    limit = LookupLimit()
    with caplog.at_level(logging.WARNING, logger="vllm.penstock"):
        for took in (0.01, 0.2, 0.3, 0.01, 0.4):
            limit.note(took)
    [said] = caplog.messages
    assert "took 0.20 s" in said
    assert "may take 0.80 s" in said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time by which requests wait."""
    return Clock(monkeypatch, "penstock.vllm.scheduler.lookups")


@pytest.mark.parametrize(
    ("grown", "saves", "waits"),
    [
        # Beyond the first limit nobody waits longer than the limit, nor than a load would save.
        (0.0, math.inf, FIRST),
        (0.24, math.inf, 0.96),
        (0.24, 0.5, 0.5),
        (0.24, 0.01, FIRST),
        (0.24, -math.inf, FIRST),
        (0.24, None, FIRST),
        (100.0, math.inf, LONGEST),
    ],
)
def test_how_long_a_request_waits(
    grown: float, saves: float | None, waits: float, clock: Clock
) -> None:
    limit = LookupLimit()
    limit.note(grown)
    engine = PlainEngine([FULL], limit=limit)
    request = engine.ask("r", PROMPT)
    state = engine.half._requests[request.request_id]
    began = clock.now
    for waited, is_late in ((0.0, False), (waits - 0.001, False), (waits + 0.001, True)):
        clock.now = began + waited
        assert engine.half._lookups.is_late(state, lambda: saves) == is_late
    engine.half.shutdown()


def test_a_fixed_limit_is_the_pools_to_keep(clock: Clock) -> None:
    engine = PlainEngine([FULL], lookup_timeout=30.0)
    request = engine.ask("r", PROMPT)
    clock.now += 29.0
    state = engine.half._requests[request.request_id]
    assert not engine.half._lookups.is_late(state, lambda: None)
    engine.half.shutdown()


def compute(engine: PlainEngine, request: Asked) -> None:
    """Has the request computed, and its blocks stored."""
    engine.step({request.request_id: len(PROMPT)})
    engine.settle()
    engine.finish(request)


def until_known(engine: PlainEngine) -> float:
    """What the last look-up took, once one is answered."""

    def latency() -> float | None:
        engine.half._lookups.take_answers()
        found = engine.half._lookups.latency
        return found if math.isfinite(found or math.inf) else None

    found = eventually(latency)
    assert found is not None
    return found


def test_a_look_up_that_nobody_waits_for_tells_what_look_ups_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock
) -> None:
    # However long this machine stands still.
    monkeypatch.setattr(lookups, "LONGEST", LIMIT)
    with Server("redis", tmp_path) as server, Way(server.port) as way:
        limit = LookupLimit()
        engine = PlainEngine([FULL], pool=f"redis://127.0.0.1:{way.port}", limit=limit)
        engine.put_prompt(PROMPT)
        way.hold()
        first = engine.ask("first", PROMPT)
        way.wait_held()
        clock.now += FIRST + 0.001
        # It is computed, and is over before its look-up.
        assert engine.half.match("first", 0) == 0
        compute(engine, first)
        assert engine.half._lookups.latency == math.inf
        way.release()
        took = until_known(engine)
        assert limit.seconds == min(LONGEST, max(FIRST, TIMES * took))
        # What the pool has is loaded, however slow this machine is at that.
        limit.seconds = LIMIT
        second = engine.ask("second", PROMPT)
        assert engine.match(second) == len(PROMPT) // 4 * 4
        engine.half.shutdown()


class Questions:
    """Look-ups of which the test says whether they are under way."""

    def __init__(self) -> None:
        self.under_way = True
        self.timeouts: list[float] = []

    def ask(self, *asked: Any) -> int:
        self.timeouts.append(asked[-1])
        return 1

    def is_asked(self, name: str) -> bool:
        return self.under_way

    def begin(self, on: lookups.Lookups, name: str) -> float:
        """Begins the look-up of a request; the seconds that the pool has."""
        on.start(RequestState(Asked(name, [1], 1), "always"))
        return self.timeouts[-1]


def test_one_look_up_at_a_time_measures(clock: Clock) -> None:
    engine, asked = PlainEngine([FULL], limit=LookupLimit()), Questions()
    half, catalogue = engine.half, cast("Any", asked)
    measured = lookups.Lookups(
        half._store, catalogue, engine.agreement, LookupLimit(), half._counters
    )
    assert asked.begin(measured, "a") == LONGEST
    assert asked.begin(measured, "b") == FIRST
    # The first was answered, by a refusal: the next one measures.
    asked.under_way = False
    assert asked.begin(measured, "c") == LONGEST
    asked.under_way = True
    assert asked.begin(measured, "d") == FIRST
    # However it ended, after the longest time it is over.
    clock.now += LONGEST
    assert asked.begin(measured, "e") == LONGEST
    # What is known need not be measured.
    clock.now += LONGEST
    measured.latency = 0.01
    assert asked.begin(measured, "f") == FIRST
    measured.shutdown()
    engine.half.shutdown()
