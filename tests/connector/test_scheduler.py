"""The scheduler half, without vLLM: what it offers, orders and learns."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.waiting import LIMIT
from penstock.vllm.groups import Group
from penstock.vllm.messages import IDLE_SECONDS, IDLE_TO_END_SECONDS, BlockJob
from penstock.vllm.scheduler import lookup_waits
from penstock.vllm.scheduler.lookups import Lookups
from penstock.vllm.scheduler.requests import Phase, RequestState
from tests.clock import Clock
from tests.connector.engine import Asked, Name, PlainEngine
from tests.connector.silent import silent_pool

FULL = Group(0, "full_attention", 4, None, "bfloat16", ())
COARSE = Group(1, "full_attention", 8, None, "bfloat16", ())
WINDOW = Group(2, "sliding_window", 4, 6, "bfloat16", ())

PROMPT = list(range(100, 121))
"""Five blocks and a token."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that the scheduler half goes by."""
    modules = ("half", "probing", "savings", "transfers")
    return Clock(monkeypatch, *(f"penstock.vllm.scheduler.{name}" for name in modules))


def computed(engine: PlainEngine, request: Asked) -> list[BlockJob]:
    """Computes the rest of a prompt in one step; the stores of that step."""
    left = request.num_tokens - request.num_computed_tokens
    return engine.step({request.request_id: left}).stores


def test_what_one_request_stored_another_loads_but_for_the_last_token() -> None:
    engine = PlainEngine([FULL])
    first = engine.ask("first", PROMPT)
    assert engine.match(first) == 0
    [store] = computed(engine, first)
    assert len(store.blocks) == 5
    assert store.blocks.block_ids == first.tables[0][:5]
    engine.settle()
    engine.put_prompt(PROMPT)
    again = engine.ask("again", PROMPT[:20])
    # 20 tokens are five blocks; the last token is computed.
    assert engine.match(again) == 16
    engine.load(again, 0, 16)
    [load] = engine.step({}).loads
    assert load.blocks.block_ids == again.tables[0][:4]
    engine.settle()
    again.num_computed_tokens = 16
    assert computed(engine, again) == []


def test_a_block_is_stored_once_whoever_fills_it() -> None:
    engine = PlainEngine([FULL])
    one, other = engine.ask("one", PROMPT), engine.ask("other", PROMPT)
    assert engine.match(one) == engine.match(other) == 0
    orders = engine.step({"one": 21, "other": 21})
    assert [job.request_id for job in orders.stores] == ["one"]
    # Not in the pool after all: whoever fills it next stores it.
    for part in list(engine.parts):
        engine.end(part, missing=[1, 3])
    third = engine.ask("third", PROMPT)
    assert engine.match(third) == 4
    [store] = computed(engine, third)
    assert store.blocks.block_ids == [third.tables[0][1], third.tables[0][3]]


def test_blocks_that_decoding_fills_are_stored_with_their_hashes() -> None:
    engine = PlainEngine([FULL, COARSE])
    request = engine.ask("r", PROMPT[:6])
    assert engine.match(request) == 0
    [first] = computed(engine, request)
    assert len(first.blocks) == 1
    stored = [len(job.blocks) for _ in range(3) for job in engine.step({"r": 1}).stores]
    # The eighth token fills the second block of the one group and the first of the other.
    assert stored == [2]
    engine.settle()


def test_while_a_block_is_on_its_way_others_wait_for_it() -> None:
    engine = PlainEngine([FULL])
    engine.put_prompt(PROMPT)
    one = engine.ask("one", PROMPT)
    other = engine.ask("other", PROMPT)
    assert engine.match(one) == 20
    engine.load(one, 0, 20)
    assert engine.match(other) is None
    engine.step({})
    engine.settle()
    assert engine.match(other, 20) == 0


def test_what_a_load_did_not_bring_is_not_asked_for_again() -> None:
    engine = PlainEngine([FULL])
    engine.put_prompt(PROMPT)
    request = engine.ask("r", PROMPT)
    assert engine.match(request) == 20
    engine.load(request, 0, 20)
    engine.step({})
    [part] = engine.parts
    engine.end(part, missing=[2, 3, 4])
    assert engine.match(request, 8) == 0
    counts = engine.half.take_counts()
    assert counts is not None
    assert counts["loaded_tokens"] == 8
    # They are computed, and stored anew: nobody has them any more.
    request.num_computed_tokens = 8
    [store] = computed(engine, request)
    assert len(store.blocks) == 3


def test_a_request_that_goes_while_it_loads_is_kept_until_the_load_is_over() -> None:
    engine = PlainEngine([FULL])
    engine.put_prompt(PROMPT)
    request = engine.ask("r", PROMPT)
    assert engine.match(request) == 20
    engine.load(request, 0, 20)
    orders = engine.step({})
    assert not engine.finish(request)
    assert engine.step({}).cancel_loads == [orders.loads[0].job]
    assert engine.half._requests["r"].phase is Phase.ENDED
    engine.settle()
    assert engine.half._requests == {}


def test_a_preempted_request_is_flushed_and_looked_up_again() -> None:
    engine = PlainEngine([FULL])
    request = engine.ask("r", PROMPT)
    assert engine.match(request) == 0
    [store] = computed(engine, request)
    assert engine.step({}, preempted=["r"]).flush == [store.job]
    engine.put_prompt(PROMPT)
    assert engine.match(request) == 20
    engine.settle()


def test_a_group_with_a_window_needs_the_last_blocks_alone() -> None:
    engine = PlainEngine([FULL, WINDOW])
    engine.put_prompt(PROMPT)
    request = engine.ask("r", PROMPT)
    assert engine.match(request) == 0
    for block_hash in engine.names(request, 1)[3:5]:
        engine.put((1, block_hash))
    third = engine.ask("third", PROMPT)
    assert engine.match(third) == 20
    engine.load(third, 0, 20)
    [load] = engine.step({}).loads
    assert len(load.blocks) == 7
    engine.settle()


def test_presence_can_be_forgotten() -> None:
    engine = PlainEngine([FULL])
    engine.put_prompt(PROMPT)
    request = engine.ask("r", PROMPT)
    again = engine.ask("again", PROMPT)
    assert engine.match(again) == 20
    assert engine.match(request) == 20
    engine.half.forget_presence()
    assert engine.match(again) == 0
    assert len(computed(engine, request)[0].blocks) == 5


def test_what_was_not_waited_for_is_declined_only_if_it_is_computed() -> None:
    engine = PlainEngine([FULL], policy="auto")
    first = engine.ask("first", PROMPT)
    assert engine.match(first) == 0
    computed(engine, first)
    engine.put_prompt(PROMPT)
    late = engine.ask("late", PROMPT)
    probing, state = engine.half._probing, engine.half._requests["late"]
    probing.note_unawaited(state, 0)
    # It waits for its turn meanwhile: nothing is declined, and the answer counts.
    engine.step({})
    assert state.unawaited_from == 0
    assert engine.match(late) == 20
    assert state.unawaited_from is None
    engine.ask("other", PROMPT)
    state = engine.half._requests["other"]
    probing.note_unawaited(state, 0)
    engine.step({"other": 21})
    while not state.is_declined:
        engine.step({})
    counts = engine.half.take_counts()
    assert counts is not None
    assert counts["declined_tokens"] == 20


def test_an_offer_that_the_engine_does_not_take_is_computed() -> None:
    """vLLM may take none of it, as where it lacks other outputs of these tokens."""
    engine = PlainEngine([FULL])
    engine.put_prompt(PROMPT)
    for name in ("first", "second"):
        request = engine.ask(name, PROMPT)
        assert engine.match(request) == 20
        engine.half.on_scheduled()
        orders = engine.step({name: len(PROMPT)})
        assert not orders.loads
        assert not orders.stores, "the pool has them"
        assert not engine.finish(request)
    third = engine.ask("third", PROMPT)
    assert engine.match(third) == 20
    engine.load(third, 0, 20)
    assert [job.request_id for job in engine.step({}).loads] == ["third"]
    engine.settle()
    assert (engine.half.take_counts() or {})["loaded_tokens"] == 20


def test_what_loads_save_and_what_requests_wait_is_counted_for_their_tenant(clock: Clock) -> None:
    engine = PlainEngine([FULL])
    advisor = engine.half._advisor
    engine.put_prompt(PROMPT)
    request = engine.ask("r", PROMPT, {"penstock.tenant": "red"})
    assert engine.match(request) == 20
    engine.load(request, 0, 20)
    engine.step({})
    clock.now += 1.5
    engine.settle()
    counts = engine.half.take_counts()
    assert counts is not None
    assert counts["load_wait_seconds/red"] == pytest.approx(1.5)
    loads = counts["load_seconds/pool"]
    assert isinstance(loads, list)
    assert len(loads) == 1
    # What it saves is not known before a long step; then what was loaded before is valued too.
    assert "prefill_saved_seconds/red" not in counts
    advisor.on_step(clock.now, 1_000, 1_000, 500_500)
    clock.now += 1.0
    advisor.on_output(clock.now, [1_000])
    other = engine.ask("other", PROMPT, {"penstock.tenant": "not a name"})
    assert engine.match(other) == 20
    engine.load(other, 0, 20)
    engine.step({})
    engine.settle()
    counts = engine.half.take_counts()
    assert counts is not None
    # A second for 1,000 tokens.
    assert counts["prefill_saved_seconds/red"] == pytest.approx(0.020, rel=0.1)
    assert counts["prefill_saved_seconds/"] == counts["prefill_saved_seconds/red"]


def native_calls(
    work: Callable[[], object], after: Callable[[str], object] = lambda name: None
) -> list[str]:
    """The native functions that Python calls meanwhile. Calls `after` as each one returns."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        owner = type(getattr(called, "__self__", None))
        if owner.__module__ != "penstock._native":
            return
        if event == "c_call":
            calls.append(called.__name__)
        elif event == "c_return":
            after(called.__name__)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_workers_are_left_alone_until_a_load_ends_that_is_expected_to_end_soon(
    clock: Clock,
) -> None:
    engine = PlainEngine([FULL])
    engine.put_prompt(PROMPT)

    expected = engine.half._transfers._ends

    def load(name: str) -> None:
        request = engine.ask(name, PROMPT)
        assert engine.match(request) == 20
        engine.load(request, 0, 20)

    def rest(ends_in: float | None) -> float:
        """How long workers are left alone in a step."""
        if ends_in is not None:
            [number] = expected
            expected[number] = clock.now + ends_in
        return engine.step({}).idle_until - clock.now

    load("first")
    assert expected == {}, "nothing is known of the pool"
    assert rest(None) == pytest.approx(IDLE_SECONDS)
    engine.settle()
    load("second")
    [end] = expected.values()
    assert end < clock.now + IDLE_TO_END_SECONDS, "loads from it take less"
    assert rest(0.9 * IDLE_TO_END_SECONDS) == pytest.approx(IDLE_TO_END_SECONDS)
    assert rest(2 * IDLE_TO_END_SECONDS) == pytest.approx(IDLE_SECONDS), "it ends later"
    rested = rest(-IDLE_TO_END_SECONDS)
    assert rested == pytest.approx(IDLE_SECONDS), "it has not ended when it was expected to"
    engine.settle()


def test_an_engine_without_work_waits_a_moment_for_a_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, lookup_waits.__name__, Lookups.__module__)

    def after(name: str) -> None:
        """A wait that nobody ends lasts until the moment is over."""
        if name == "wait":
            clock.now += lookup_waits._MOMENT

    with silent_pool() as url:
        engine = PlainEngine([FULL], pool=url)
        names = ("first", "second")

        def waits() -> list[int]:
            """How often each request is waited for in this step."""
            assert all(engine.half._catalogue.is_asked(name) for name in names)
            return [
                native_calls(lambda name=name: engine.half.match(name, 0), after).count("wait")
                for name in names
            ]

        for name in names:
            engine.ask(name, PROMPT)
        first, second = waits()
        assert first >= 1
        assert second == 0, "the moment is over"
        engine.step({})
        assert waits()[0] >= 1, "another step has another moment"
        engine.step({})
        engine.half.on_scheduled()
        assert waits() == [0, 0], "a request is computed in this step"
        engine.step({})
        assert waits()[0] >= 1
        engine.step({})
        engine.half._lookups.latency = 1.0
        assert waits() == [0, 0], "look-ups take longer than a moment"
        engine.step({})
        engine.half._lookups.latency = None
        other = engine.ask("other", PROMPT[:3])
        assert engine.match(other) == 0
        engine.step({"other": 3})
        assert waits() == [0, 0], "a request is being computed"
    engine.half.shutdown()


def test_a_lookup_answered_in_a_moment_needs_no_other_step_and_counts_as_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = PlainEngine([FULL])
    engine.put_prompt(PROMPT)
    lookups = engine.half._lookups
    take_answers = lookups.take_answers

    def wait_for(state: RequestState, until: float) -> None:
        """The answer comes now, neither before nor later."""
        monkeypatch.setattr(lookups, "take_answers", take_answers)
        Lookups.wait_for(lookups, state, until + LIMIT)

    monkeypatch.setattr(lookups, "take_answers", lambda: None)
    monkeypatch.setattr(lookups, "wait_for", wait_for)
    engine.ask("r", PROMPT)
    assert engine.half.match("r", 0) == 20
    counts = engine.half.take_counts()
    assert counts is not None
    assert counts["load_wait_seconds/"] > 0


def test_an_answer_to_the_engine_takes_few_native_calls_however_long_the_prompt() -> None:
    engine = PlainEngine([FULL])
    prompt = list(range(4_000))
    engine.put_prompt(prompt)
    request = engine.ask("r", prompt)
    assert engine.match(request) == 3_996
    assert len(native_calls(lambda: engine.match(request))) <= 6
    decoding = [engine.ask(f"d{number}", PROMPT) for number in range(20)]
    for each in decoding:
        engine.match(each)
    engine.step({each.request_id: each.num_tokens for each in decoding})
    tokens = {each.request_id: 1 for each in decoding}
    # None of them fills a block.
    assert len(native_calls(lambda: engine.step(tokens))) <= 6


def test_the_halves_import_no_vllm() -> None:
    names = "penstock.vllm.scheduler", "penstock.vllm.worker"
    program = f"import sys, {', '.join(names)}; print('vllm' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert run.stdout == b"False\n"


@st.composite
def engines(draw: st.DrawFn, **more: Any) -> PlainEngine:
    groups = draw(st.sampled_from([[FULL], [FULL, COARSE], [FULL, WINDOW], [WINDOW]]))
    policy = draw(st.sampled_from(["always", "auto"]))
    return PlainEngine(groups, ranks=draw(st.integers(1, 2)), policy=policy, **more)


class Schedule:
    """A random schedule, and what a simple model says of it."""

    def __init__(self, engine: PlainEngine, chance: random.Random) -> None:
        self.engine, self.chance = engine, chance
        self.waiting: list[Asked] = []
        self.loading: dict[str, tuple[Asked, int]] = {}
        self.running: list[Asked] = []
        self.whole: list[Asked] = []
        """Requests that were computed to their end."""
        self.failed: set[Name] = set()
        """Blocks that some store did not put."""
        self.numbers = 0

    def play(self, moves: int) -> None:
        for _ in range(moves):
            move = self.chance.choice(
                [self.arrive, self.put, self.preempt, self.abort]
                + 2 * [self.admit, self.compute, self.end_some]
            )
            move()
        while self.waiting or self.running or self.loading:
            self.engine.settle(self.chance)
            self.note_loaded()
            self.admit()
            self.compute()
            for request in list(self.running):
                if request.num_computed_tokens >= request.num_prompt_tokens:
                    self.finish(request)
                    self.whole.append(request)
        self.engine.step({})
        self.engine.settle()
        self.check_stored()

    def check_stored(self) -> None:
        """Of a request that was computed to its end every block is in the pool, or its store
        failed."""
        for request in self.whole:
            for position, group in enumerate(self.engine.groups):
                full = self.stored_tokens(request) // group.block_size
                names = {(position, name) for name in self.engine.names(request, position)[:full]}
                assert names <= self.engine.pool | self.failed

    def stored_tokens(self, request: Asked) -> int:
        """The tokens of the request whose blocks are stored."""
        return request.num_computed_tokens

    def arrive(self) -> None:
        self.numbers += 1
        # Few different beginnings, so that requests share blocks.
        tokens = [self.chance.randrange(2)] * 8 + [self.chance.randrange(2)] * 9
        tokens += [self.chance.randrange(3)] * self.chance.randrange(10)
        self.waiting.append(self.engine.ask(f"r{self.numbers}", tokens, self.params(tokens)))

    def params(self, tokens: list[int]) -> dict[str, Any] | None:
        """What the next request says besides."""
        return None

    def put(self) -> None:
        requests = self.waiting + self.running
        if requests:
            request = self.chance.choice(requests)
            group = self.chance.randrange(len(self.engine.groups))
            for block_hash in self.engine.names(request, group):
                self.engine.put((group, block_hash))

    def admit(self) -> None:
        if not self.waiting:
            return
        request = self.waiting.pop(self.chance.randrange(len(self.waiting)))
        offered = self.engine.match(request)
        if offered is None:
            self.waiting.append(request)
        elif offered:
            self.check_offer(request, offered)
            self.engine.load(request, 0, offered)
            self.loading[request.request_id] = request, offered
        else:
            self.running.append(request)

    def check_offer(self, request: Asked, offered: int) -> None:
        """All that is needed to compute on from there was put into the pool at some time."""
        assert offered < request.num_tokens
        for position, group in enumerate(self.engine.groups):
            names = self.engine.names(request, position)
            assert offered % group.block_size == 0
            since = 0 if group.window is None else max(0, offered - group.window + 1)
            for block in range(since // group.block_size, offered // group.block_size):
                assert (position, names[block]) in self.engine.pool

    def compute(self) -> None:
        some = [r for r in self.running if self.chance.random() < 0.7]
        tokens = {
            r.request_id: max(1, min(self.chance.randrange(1, 12), left))
            for r in some
            if (left := r.num_tokens - r.num_computed_tokens) > 0
        }
        self.engine.step(tokens)
        stores = {part.job.job for part in self.engine.parts if part.kind == "store"}
        under_way = [name for job in stores for name in self.engine.names_of_store[job]]
        assert len(set(under_way)) == len(under_way)

    def preempt(self) -> None:
        if self.running:
            request = self.running.pop(self.chance.randrange(len(self.running)))
            unread = {
                part.job.job
                for part in self.engine.parts
                if part.kind == "store"
                and part.job.request_id == request.request_id
                and not part.is_read
            }
            orders = self.engine.step({}, preempted=[request.request_id])
            assert unread <= set(orders.flush)
            self.waiting.append(request)

    def abort(self) -> None:
        requests = [*self.waiting, *self.running, *(r for r, _ in self.loading.values())]
        if requests:
            self.finish(self.chance.choice(requests))

    def finish(self, request: Asked) -> None:
        is_loading = request.request_id in self.loading
        waits = self.engine.finish(request)
        assert not (waits and is_loading)
        self.waiting = [r for r in self.waiting if r is not request]
        self.running = [r for r in self.running if r is not request]
        self.loading.pop(request.request_id, None)
        self.engine.step({})

    def end_some(self) -> None:
        if self.engine.parts:
            part = self.chance.choice(self.engine.parts)
            positions = range(len(part.job.blocks))
            missing = [i for i in positions if self.chance.random() < 0.1]
            if part.kind == "store":
                names = self.engine.names_of_store[part.job.job]
                self.failed |= {names[i] for i in missing}
            self.engine.end(part, missing)
        self.note_loaded()

    def note_loaded(self) -> None:
        under_way = {part.job.request_id for part in self.engine.parts if part.kind == "load"}
        for request_id in list(self.loading):
            if request_id not in under_way and not self.is_ordered(request_id):
                request, offered = self.loading.pop(request_id)
                request.num_computed_tokens = offered
                self.running.append(request)

    def is_ordered(self, request_id: str) -> bool:
        """Whether a load still waits for the next step."""
        state = self.engine.half._requests.get(request_id)
        return state is not None and state.phase is Phase.LOADING


@settings(max_examples=150)
@given(engines(), st.integers(0, 1 << 32), st.integers(5, 60))
def test_random_schedules_leave_nothing_behind(engine: PlainEngine, seed: int, moves: int) -> None:
    # Drawn beforehand: when look-ups are answered is nobody's to draw.
    schedule = Schedule(engine, random.Random(seed))
    schedule.play(moves)
    catalogue = engine.half._catalogue
    assert engine.half._requests == {}
    assert catalogue.loads == 0
    assert not catalogue.is_reading
    assert engine.parts == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_of_a_window_are_read_before_they_are_given_away(ranks: int) -> None:
    engine = PlainEngine([FULL, WINDOW], ranks=ranks)
    request = engine.ask("r", PROMPT)
    assert engine.match(request) == 0
    [store] = computed(engine, request)
    given = request.tables[1][0]
    assert engine.half._catalogue.readers([given]) == [store.job]
    engine.settle()
    assert engine.half._catalogue.readers([given]) == []
