"""The scheduler half between a prefill engine and a decode engine, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.waiting import LIMIT, eventually
from penstock.errors import ConfigError
from penstock.vllm.groups import Group
from penstock.vllm.roles import role_named
from penstock.vllm.scheduler.promises import Promise, read_promise
from tests.clock import Clock
from tests.connector.engine import Asked, PlainEngine

FULL = Group(0, "full_attention", 4, None, "bfloat16", ())

PROMPT = list(range(100, 121))
"""Five blocks and a token."""

TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TO_DECODE = {"do_remote_decode": False, "do_remote_prefill": True}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that hand-over goes by."""
    return Clock(monkeypatch, "penstock.vllm.scheduler.handover")


def decoder(policy: str = "always", role: str = "kv_consumer", **more: Any) -> PlainEngine:
    engine = PlainEngine([FULL], policy=policy, role=role, **{"handover_timeout": 8.0, **more})
    ask = engine.half._lookups.ask
    # A short limit is one of requests' waits. The pool may take as long as this machine does.
    engine.half._lookups.ask = lambda name, _=None: ask(name, LIMIT)  # type: ignore[method-assign]
    return engine


def take_answer(engine: PlainEngine, request: Asked) -> None:
    """Waits until the pool has answered."""

    def is_answered() -> bool:
        engine.half._lookups.take_answers()
        return not engine.half._catalogue.is_asked(request.request_id)

    eventually(is_answered, pause=0.0005)


def offer(engine: PlainEngine, clock: Clock, request: Asked) -> int | None:
    """What the engine is offered once the pool was asked again."""
    take_answer(engine, request)
    engine.match(request)
    # One step plans the next look-up, one starts it.
    for _ in range(2):
        engine.step({})
        clock.now += 0.2
    take_answer(engine, request)
    return engine.half.match(request.request_id, 0)


def counts(engine: PlainEngine) -> dict[str, Any]:
    return engine.half.take_counts() or {}


def test_a_consumer_waits_until_all_has_come(clock: Clock) -> None:
    engine = decoder()
    request = engine.ask("r", PROMPT)
    assert offer(engine, clock, request) is None
    engine.put_prompt(PROMPT[:8])
    assert offer(engine, clock, request) is None
    engine.put_prompt(PROMPT)
    assert offer(engine, clock, request) == 20
    seen = counts(engine)
    assert seen["handovers"] == 1
    assert "handovers_given_up" not in seen
    # However often the pool was asked, this was one look-up.
    assert (seen["lookups"], seen["lookup_blocks"]) == (1, 5)
    assert seen.get("lookup_hit_blocks", 0) == 0


def test_what_has_come_is_fetched_while_the_rest_is_waited_for(clock: Clock) -> None:
    engine = decoder()
    request = engine.ask("r", PROMPT)
    for tokens in (0, 8, 16, 20):
        engine.put_prompt(PROMPT[:tokens])
        offer(engine, clock, request)
        engine.step({})
        engine.settle()
    # No block twice, and the last one by the load itself.
    assert [len(job.blocks) for old in engine.orders for job in old.prefetches] == [2, 2]
    assert engine.match(request) == 20
    engine.load(request, 0, 20)
    engine.step({})
    # All prefetches are released with the load.
    prefetches = {job.job for old in engine.orders for job in old.prefetches}
    assert prefetches
    assert {number for old in engine.orders for number in old.release} == prefetches
    engine.settle()


def test_more_blocks_make_for_more_patience(clock: Clock) -> None:
    engine = decoder()
    request = engine.ask("r", PROMPT)
    for tokens in (4, 8, 12):
        engine.put_prompt(PROMPT[:tokens])
        assert offer(engine, clock, request) is None
        clock.now += 7.0
    clock.now += 2.0
    # What is there is loaded, and the rest computed.
    assert engine.match(request) == 12
    assert counts(engine)["handovers_given_up"] == 1
    engine.put_prompt(PROMPT)
    assert engine.match(request) == 12


def test_where_nothing_ever_comes_waits_become_short(clock: Clock) -> None:
    engine = decoder(lookup_timeout=0.5)
    waited = []
    for number in range(7):
        prompt = [1000 * number + token for token in PROMPT]
        request = engine.ask(str(number), prompt)
        began = clock.now
        while engine.match(request) is None:
            clock.now += 0.25
        waited.append(clock.now - began)
        engine.finish(request)
    assert waited == [8.0, 4.0, 2.0, 1.0, 0.5, 0.5, 0.5]
    # Once something comes, they are long again.
    request = engine.ask("comes", PROMPT)
    engine.match(request)
    engine.put_prompt(PROMPT)
    assert offer(engine, clock, request) == 20
    engine.finish(request)
    request = engine.ask("after", [9000 + token for token in PROMPT])
    assert engine.match(request) is None
    clock.now += 7.9
    assert engine.match(request) is None
    clock.now += 0.2
    assert engine.match(request) == 0


def waited(
    engine: PlainEngine, clock: Clock, number: int, told: bool = False, salt: bytes = b""
) -> float:
    """How long a request waits for which nothing comes."""
    prompt = [1000 * number + token for token in PROMPT]
    request = engine.ask(str(number), prompt, TO_DECODE if told else None, salt=salt)
    began = clock.now
    while engine.match(request) is None:
        clock.now += 0.25
    engine.finish(request)
    return clock.now - began


@pytest.mark.parametrize("salt", [b"", b"theirs"])
def test_bogus_announcements_shorten_no_others_wait(clock: Clock, salt: bytes) -> None:
    engine = decoder(lookup_timeout=0.5)
    bogus = [waited(engine, clock, number, told=True, salt=salt) for number in range(6)]
    # Their own waits become short, if they can be told from others.
    assert bogus == ([8.0, 4.0, 2.0, 1.0, 0.5, 0.5] if salt else [8.0] * 6)
    assert waited(engine, clock, 10, told=True) == 8.0
    assert waited(engine, clock, 11, told=True, salt=b"mine") == 8.0
    assert waited(engine, clock, 12, salt=b"mine too") == 8.0
    assert waited(engine, clock, 13) == 8.0


def test_waits_are_counted_of_a_bounded_number_of_clients(clock: Clock) -> None:
    engine = decoder(handover_timeout=0.5, lookup_timeout=0.5)
    for number in range(1100):
        waited(engine, clock, number, told=True, salt=b"%d" % number)
    assert len(engine.half._patience._in_vain) == 1024


def test_where_computing_is_fast_waits_are_short(clock: Clock) -> None:
    engine = decoder("auto", handover_timeout=60.0, lookup_timeout=0.5)
    engine.half._advisor.on_step(0.0, 1, 2000, 2_000_000)
    engine.half._advisor.on_output(4.0, [1])
    prompt = list(range(1001))
    request = engine.ask("r", prompt)
    engine.put_prompt(prompt[:500])
    assert offer(engine, clock, request) is None
    # The other half of it takes about a second to compute: twice that is waited.
    clock.now += 1.0
    assert engine.match(request) is None
    clock.now += 4.0
    assert engine.match(request) is not None
    assert counts(engine)["handovers_given_up"] == 1


def test_only_those_wait_whose_prompt_is_computed_elsewhere(clock: Clock) -> None:
    both = decoder(role="kv_both")
    assert both.match(both.ask("plain", PROMPT)) == 0
    assert both.match(both.ask("announced", PROMPT, TO_DECODE)) is None
    consumer = decoder()
    assert consumer.match(consumer.ask("short", PROMPT[:4])) == 0
    never = decoder("never")
    assert never.match(never.ask("r", PROMPT)) == 0


def test_an_idle_engine_rests_while_it_waits(clock: Clock) -> None:
    engine = decoder()
    request = engine.ask("r", PROMPT)
    engine.match(request)
    assert engine.step({}).idle_until > 0
    clock.now += 60.0
    engine.match(request)
    assert engine.step({}).idle_until == 0


def test_a_request_that_goes_while_it_waits(clock: Clock) -> None:
    engine = decoder()
    request = engine.ask("r", PROMPT)
    assert engine.match(request) is None
    engine.finish(request)
    assert not engine.half._handover.waits
    assert engine.step({}).idle_until == 0
    assert len(engine.half._catalogue) == 0


def test_vllm_is_told_where_a_load_comes_from(clock: Clock) -> None:
    engine = decoder()
    engine.put_prompt(PROMPT)
    request = engine.ask("r", PROMPT)
    assert offer(engine, clock, request) == 20
    engine.load(request, 0, 20)
    # This engine's pool is in its own process.
    assert engine.half.hit_sources("r", 20) == {"host": 20}
    assert engine.half.hit_sources("gone", 20) == {"host": 20}


class TestPromises:
    def promise(self, **more: Any) -> dict[str, Any]:
        """What the answer of a prefill engine has."""
        engine = PlainEngine([FULL], role="kv_producer")
        request = engine.ask("p", PROMPT, TO_PREFILL)
        assert engine.match(request) == 0
        take_answer(engine, request)
        [store] = engine.step({"p": len(PROMPT)}).stores
        assert store.is_awaited
        said = engine.half.promise("p")
        assert said is not None
        said["penstock.promise"] |= more
        return said

    def test_it_says_what_is_on_its_way(self, clock: Clock) -> None:
        said = self.promise()
        assert (said["do_remote_prefill"], said["do_remote_decode"]) == (True, False)
        assert said["remote_request_id"] == "p"
        assert said["penstock.promise"]["tokens"] == 20
        for engine in (decoder(role="kv_both"), decoder()):
            request = engine.ask("r", PROMPT, said)
            assert engine.match(request) is None
            engine.put_prompt(PROMPT)
            assert offer(engine, clock, request) == 20

    def test_no_more_is_waited_for_than_was_promised(self, clock: Clock) -> None:
        longer = [*PROMPT, *range(200, 220)]
        engine = decoder()
        request = engine.ask("r", longer, self.promise())
        engine.put_prompt(PROMPT)
        assert offer(engine, clock, request) == 20

    @pytest.mark.parametrize(
        "wrong",
        [
            {"namespaces": ["00" * 16]},
            {"namespaces": []},
            {"last": "00" * 32},
            {"tokens": 16},
            {"tokens": 1 << 60},
        ],
    )
    def test_one_that_does_not_fit_makes_nobody_wait(
        self, clock: Clock, wrong: dict[str, Any]
    ) -> None:
        engine = decoder()
        assert engine.match(engine.ask("r", PROMPT, self.promise(**wrong))) == 0
        assert counts(engine)["promises_refused"] == 1

    def test_only_who_is_asked_promises(self) -> None:
        for params in (None, {}, {"do_remote_decode": False}):
            engine = PlainEngine([FULL], role="kv_producer")
            engine.ask("p", PROMPT, params)
            assert engine.half.promise("p") is None
        # A consumer stores nothing, so it has nothing to promise.
        consumer = PlainEngine([FULL], role="kv_consumer")
        consumer.ask("p", PROMPT, TO_PREFILL)
        said = consumer.half.promise("p")
        assert said is not None
        assert said["penstock.promise"]["tokens"] == 0

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: (
                st.lists(inner)
                | st.dictionaries(
                    st.sampled_from(["penstock.promise", "namespaces", "tokens", "last"]), inner
                )
            ),
        )
    )
    def test_anything_may_come(self, written: Any) -> None:
        for params in (written, {"penstock.promise": written}):
            if isinstance(params, dict):
                read_promise(params)

    @given(st.lists(st.binary(min_size=16, max_size=16)), st.integers(0), st.binary())
    def test_what_is_written_is_read(
        self, namespaces: list[bytes], tokens: int, last: bytes
    ) -> None:
        promise = Promise(tuple(namespaces), tokens, last)
        assert read_promise(promise.as_params()) == promise


class TestRoles:
    def test_a_producer_stores_and_never_loads(self) -> None:
        engine = PlainEngine([FULL], role="kv_producer")
        engine.put_prompt(PROMPT[:12])
        request = engine.ask("r", PROMPT)
        assert engine.match(request) == 0
        take_answer(engine, request)
        assert engine.match(request) == 0
        orders = engine.step({"r": len(PROMPT)})
        assert not orders.loads
        assert not any(old.prefetches for old in engine.orders)
        # What the pool has is not stored again.
        assert [len(job.blocks) for job in orders.stores] == [2]

    def test_a_consumer_loads_and_stores_only_if_told(self) -> None:
        engine = PlainEngine([FULL], role="kv_consumer")
        engine.put_prompt(PROMPT)
        request = engine.ask("r", PROMPT)
        assert engine.match(request) == 20
        assert engine.step({"r": 21}).stores == []
        assert role_named("kv_consumer", consumer_stores=True).stores

    @pytest.mark.parametrize("name", [None, "", "kv_none"])
    def test_others_are_refused(self, name: str | None) -> None:
        with pytest.raises(ConfigError, match="kv_both, kv_producer, kv_consumer"):
            role_named(name)
