"""Witnesses, without vLLM: which blocks the scheduler half has compared with the pool's, and which
requests it has computed for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lab.waiting import eventually
from penstock.errors import ConfigError
from penstock.vllm.groups import Group, State
from penstock.vllm.messages import BlockJob, StepOrders, WorkerReport
from penstock.vllm.scheduler.events import Removed, Stored
from penstock.vllm.settings import Settings
from tests.clock import Clock
from tests.connector.engine import Asked, PlainEngine
from tests.connector.test_scheduler import FULL, PROMPT, WINDOW, computed

STATE = replace(FULL, index=1, kind="mamba", state=State("mamba2", (), (), "", "cpu"))

LONG = list(range(1000, 1129))
"""32 blocks and a token."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that the scheduler half goes by."""
    return Clock(monkeypatch, "penstock.vllm.scheduler.half")


def comparing(groups: Sequence[Group] = (FULL,), **more: Any) -> PlainEngine:
    """An engine that compares as by default."""
    return PlainEngine(groups, **{"witness_time": 0.01, **more})


def never_loading(groups: Sequence[Group] = (FULL,), **more: Any) -> PlainEngine:
    """An engine that declines all loads."""
    return comparing(groups, policy="never", **more)


def declined(
    engine: PlainEngine, name: str, tokens: Sequence[int], first: int = 0, **more: Any
) -> Asked:
    """A request that has its first tokens from the engine's own cache, and is to be computed. The
    pool has told what it has of the others."""
    request = engine.ask(name, tokens, **more)

    def is_told() -> bool:
        offered = engine.half.match(name, first)
        return offered == 0 and engine.half._catalogue.is_asked(name) is False

    eventually(is_told, pause=0.0005)
    request.num_computed_tokens = first
    return request


def compared(engine: PlainEngine, request: Asked) -> list[int]:
    """Computes the rest of a prompt. The first tokens of the blocks that the pool has and that are
    to be compared."""
    stores = computed(engine, request)
    assert all(job.witnesses for job in stores)
    return sorted(first for job in stores for _, first in job.blocks.places)


def count(engine: PlainEngine, name: str) -> Any:
    return (engine.half.take_counts() or {}).get(name, 0)


def test_settings_of_witnesses_are_shares() -> None:
    assert (Settings("memory://").witness_time, Settings("memory://").witness_share) == (0.01, 0.0)
    for name, most in (("witness_time", 0.5), ("witness_share", 1.0)):
        Settings("memory://", **{name: most})
        for value in (-0.1, most + 0.1, float("nan")):
            with pytest.raises(ConfigError, match=name):
                Settings("memory://", **{name: value})


def test_reports_of_ranks_are_merged() -> None:
    one = WorkerReport(disagreed={1: {0}}, witnessed=2, witness_seconds=0.2)
    other = WorkerReport(disagreed={1: {2}, 3: {1}}, witnessed=2, witness_seconds=0.1)
    both = one.merge(other)
    assert both.disagreed == {1: {0, 2}, 3: {1}}
    assert (both.witnessed, both.witness_seconds) == (4, 0.2)
    assert not WorkerReport(witness_seconds=0.1).is_empty()


def test_a_declined_hit_is_compared_within_the_budget() -> None:
    engine = never_loading()
    engine.put_prompt(PROMPT)
    # The budget begins with two blocks; one is unmeasured.
    assert compared(engine, declined(engine, "r", PROMPT)) == [4, 12]
    engine.settle()
    assert compared(engine, declined(engine, "again", PROMPT)) == [0, 16]
    # It is neither stored nor announced once more.
    engine.settle()
    assert count(engine, "stored_blocks") == 0


def test_without_time_nothing_is_compared() -> None:
    for settings in ({"witness_time": 0}, {"weight_updates": "keep"}):
        engine = comparing(witness_share=1, **settings)
        engine.put_prompt(PROMPT)
        hit = engine.ask("hit", PROMPT)
        assert engine.match(hit) == 20
        assert computed(engine, hit) == []
        other = engine.ask("other", LONG)
        assert engine.match(other) == 0
        [store] = computed(engine, other)
        assert not store.witnesses


def test_what_is_new_may_be_compared_if_another_engine_was_faster() -> None:
    engine = comparing()
    request = engine.ask("r", PROMPT)
    assert engine.match(request) == 0
    [store] = computed(engine, request)
    assert store.witnesses
    for part in list(engine.parts):
        engine.end(part, disagreed=[3], witnessed=1, seconds=1.0)
    # The budget is overdrawn.
    other = engine.ask("other", LONG)
    assert engine.match(other) == 0
    [store] = computed(engine, other)
    assert not store.witnesses
    assert count(engine, "stored_blocks") == 4


def test_what_is_computed_behind_loaded_blocks_is_not_compared() -> None:
    engine = comparing()
    engine.put_prompt(PROMPT[:8])
    loading = engine.ask("loading", PROMPT)
    assert engine.match(loading) == 8
    engine.load(loading, 0, 8)
    engine.step({})
    engine.settle()
    loading.num_computed_tokens = 8
    [store] = computed(engine, loading)
    assert not store.witnesses
    engine.settle()
    # So is what another computes behind these blocks, which it has from the engine's cache.
    longer = engine.ask("longer", [*PROMPT[:20], *LONG])
    assert engine.match(longer, 20) == 0
    longer.num_computed_tokens = 20
    [store] = computed(engine, longer)
    assert not store.witnesses
    engine.settle()


def test_a_load_that_brought_nothing_leaves_the_chain_the_engines_own() -> None:
    engine = comparing()
    engine.put_prompt(PROMPT)
    request = engine.ask("r", PROMPT)
    assert engine.match(request) == 20
    engine.load(request, 0, 20)
    engine.step({})
    [part] = engine.parts
    engine.end(part, late=[0, 1, 2, 3, 4])
    assert engine.match(request) == 0
    assert len(compared(engine, request)) == 2
    engine.settle()


def test_a_preempted_request_is_judged_by_what_it_has_then() -> None:
    engine = comparing()
    engine.put_prompt(PROMPT)
    request = engine.ask("r", PROMPT)
    assert engine.match(request) == 20
    engine.load(request, 0, 20)
    engine.step({})
    engine.settle()
    request.num_computed_tokens = 20
    assert computed(engine, request) == []
    engine.step({}, preempted=["r"])
    request.skip_reading_prefix_cache = True
    assert engine.match(request) == 0
    assert len(compared(engine, request)) == 2
    engine.settle()


def test_a_hit_in_the_engines_own_cache_counts_if_the_engine_computed_it() -> None:
    engine = never_loading()
    engine.put_prompt(PROMPT[:16])
    compared(engine, declined(engine, "first", PROMPT[:9]))
    engine.settle()
    second = declined(engine, "second", PROMPT, first=8)
    # Two more of the four blocks that the pool had, and a new one.
    assert compared(engine, second) == [8, 12, 16]
    engine.settle()


def test_after_weights_have_changed_nothing_of_before_bears_witness() -> None:
    engine = never_loading()
    engine.put_prompt(PROMPT)
    compared(engine, declined(engine, "first", PROMPT[:9]))
    engine.settle()
    engine.half.forget_presence()
    engine.put_prompt(PROMPT)
    assert computed(engine, declined(engine, "second", PROMPT[:17], first=8)) == []
    assert len(compared(engine, declined(engine, "third", PROMPT[:17]))) == 2
    engine.settle()


def test_what_disagreed_is_gone_from_the_pool() -> None:
    engine = never_loading(announces=True)
    first = declined(engine, "first", PROMPT)
    assert compared(engine, first) == [0, 4, 8, 12, 16]
    engine.settle()
    [stored] = engine.half.take_events()
    assert isinstance(stored, Stored)
    again = declined(engine, "again", PROMPT)
    assert compared(engine, again) == [4, 12]
    [part] = engine.parts
    engine.end(part, missing=[0], disagreed=[1], witnessed=1, seconds=0.001)
    # That the first was not compared says nothing.
    [removed] = engine.half.take_events()
    assert isinstance(removed, Removed)
    assert removed.block_hashes == (stored.block_hashes[3],)
    assert count(engine, "witnessed_blocks") == 1
    third = declined(engine, "third", PROMPT)
    [store] = computed(engine, third)
    assert [first for _, first in store.blocks.places] == [12, 0, 4, 8, 16]
    engine.settle()
    assert count(engine, "stored_blocks") == 1


def test_windows_and_states_are_compared_too() -> None:
    for other, expected in ((WINDOW, 5), (STATE, 1)):
        engine = never_loading([FULL, other])
        engine.put_prompt(PROMPT, (0, 1))
        request = declined(engine, "r", PROMPT[:20])
        engine.half._witnessing.on_report(100, 0.0001)
        [store] = computed(engine, request)
        groups = [group for group, _ in store.blocks.places]
        assert store.witnesses
        assert 0 < groups.count(1) <= expected
        assert 0 < groups.count(0) <= 5
        engine.settle()


def test_a_tenants_blocks_are_compared_in_its_own_namespaces() -> None:
    engine = never_loading()
    engine.put_prompt(PROMPT, tenant="red")
    for name, salt in (("red", b"salt"), ("label", b"")):
        params = {"penstock.tenant": "red"}
        request = declined(engine, name, PROMPT, params=params, salt=salt)
        [store] = computed(engine, request)
        assert store.witnesses
        assert (store.tenant, len(store.blocks)) == (("red", 2) if salt else ("", 5))
        engine.settle()


# --- the budget ---------------------------------------------------------------------------


def decode(engine: PlainEngine, clock: Clock, steps: int, seconds: float) -> None:
    """So many steps without a prompt."""
    for _ in range(steps):
        engine.step({"decoding": 1})
        clock.now += seconds


def allowed(engine: PlainEngine) -> int:
    return engine.half._witnessing.allowed(engine.half._requests["decoding"])


def decoding(engine: PlainEngine) -> None:
    request = engine.ask("decoding", LONG[:3])
    assert engine.match(request) == 0
    engine.step({"decoding": 3})


def test_the_time_of_steps_earns_comparisons(clock: Clock) -> None:
    engine = never_loading(witness_time=0.1)
    engine.put_prompt(PROMPT)
    decoding(engine)
    [part] = [*spend(engine)]
    engine.end(part, witnessed=2, seconds=0.010)
    assert allowed(engine) == 0
    decode(engine, clock, 2, 0.06)
    # The time of the last step is not known yet.
    assert allowed(engine) == 1
    decode(engine, clock, 1, 0.06)
    assert allowed(engine) == 2
    # A long rest is no work, and what is saved is bounded.
    clock.now += 1000
    engine.step({"decoding": 1})
    assert allowed(engine) == 8
    engine.step({})
    clock.now += 1000
    before = engine.half._witnessing._budget
    engine.step({"decoding": 1})
    assert engine.half._witnessing._budget == before <= 0.1


def spend(engine: PlainEngine) -> list[Any]:
    """Has as many blocks compared as the budget allows."""
    compared(engine, declined(engine, f"spent-{len(engine.requests)}", PROMPT))
    return engine.parts


def test_what_comparisons_take_is_learned_and_settled(clock: Clock) -> None:
    engine = never_loading()
    engine.put_prompt(PROMPT)
    decoding(engine)
    assert allowed(engine) == 2
    [part] = spend(engine)
    assert allowed(engine) == 0, "it is spent as it is ordered"
    engine.end(part, witnessed=2, seconds=0.001)
    # Of 10 ms, 9 are left, and a block takes half of one.
    assert allowed(engine) == 8
    [part] = spend(engine)
    engine.end(part, witnessed=5, seconds=1.0)
    assert allowed(engine) == 0
    engine.half._witnessing.on_report(0, 0.5)
    decode(engine, clock, 150, 1.0)
    assert allowed(engine) == 0, "what was overdrawn is worked off"
    decode(engine, clock, 30, 1.0)
    assert allowed(engine) == 1, "though a block takes longer than is ever saved"


def test_of_ranks_the_slowest_counts_and_each_has_compared(clock: Clock) -> None:
    engine = never_loading(ranks=2)
    engine.put_prompt(PROMPT)
    decoding(engine)
    parts = list(spend(engine))
    report = WorkerReport(witnessed=2, witness_seconds=0.002)
    engine.half.on_worker_output(
        report.merge(WorkerReport(witnessed=2, witness_seconds=0.001)), (), ()
    )
    for part in parts:
        engine.end(part)
    # 8 ms are left, and a block takes one.
    assert allowed(engine) == 8
    assert count(engine, "witnessed_blocks") == 4


# --- requests computed on purpose ---------------------------------------------------------


def hit(engine: PlainEngine, name: str, first: int = 0, **more: Any) -> tuple[Asked, int]:
    """A request with a hit, and what is offered of it."""
    request = engine.ask(name, PROMPT, **more)
    offered = engine.match(request, first)
    assert offered is not None
    return request, offered


def test_the_first_hit_and_every_so_manyth_after_it_is_computed() -> None:
    for share, chosen in ((0, []), (0.25, [0, 4, 8]), (0.1, [0]), (1, list(range(10)))):
        engine = comparing(witness_share=share)
        engine.put_prompt(PROMPT)
        offers = [hit(engine, f"{n}")[1] for n in range(10)]
        assert [n for n, offered in enumerate(offers) if not offered] == chosen, share
        assert count(engine, "witness_tokens") == 20 * len(chosen)


def test_a_chosen_request_is_compared_beyond_the_budget_and_is_no_declined_load() -> None:
    engine = comparing(policy="auto", witness_share=0.5)
    engine.put_prompt(PROMPT)
    request = engine.ask("r", PROMPT, {"penstock.load_policy": "always"})
    [job] = eventually(lambda: engine.step({}).prefetches)
    assert engine.match(request) == 0
    assert engine.match(request) == 0, "it stays chosen"
    engine.half._witnessing.on_report(1, 5.0)
    orders: StepOrders = engine.step({"r": 21})
    assert orders.release == [job.job]
    [store] = orders.stores
    assert (store.witnesses, len(store.blocks)) == (4, 4)
    engine.settle()
    counts = engine.half.take_counts()
    assert counts is not None
    assert counts["witness_tokens"] == 20
    assert "declined_tokens" not in counts
    assert "probes" not in counts


def test_a_chosen_request_that_was_preempted_loads() -> None:
    engine = comparing(witness_share=0.01)
    engine.put_prompt(PROMPT)
    request, offered = hit(engine, "r")
    assert offered == 0
    compared(engine, request)
    engine.step({}, preempted=["r"])
    assert engine.match(request) == 20
    assert hit(engine, "other")[1] == 20, "nobody is chosen in its place"
    engine.settle()


def test_a_hit_behind_loaded_blocks_is_not_chosen_but_the_next_is() -> None:
    engine = comparing(witness_share=0.01)
    engine.put_prompt(PROMPT)
    engine.half._witnessing._due = 0.0
    first, offered = hit(engine, "first")
    assert offered == 20
    engine.load(first, 0, 8)
    engine.step({})
    engine.settle()
    engine.half._witnessing._due = 1.0
    assert hit(engine, "behind", 8)[1] == 12
    assert hit(engine, "alone")[1] == 0


def test_what_another_engine_hands_over_is_not_chosen() -> None:
    engine = comparing(witness_share=1)
    engine.put_prompt(PROMPT)
    taken = {"do_remote_prefill": True}
    assert hit(engine, "taken", params=taken)[1] == 20
    assert hit(engine, "own")[1] == 0


def test_an_engine_that_does_not_store_compares_nothing_and_chooses_nobody() -> None:
    engine = comparing(role="kv_consumer", witness_share=1)
    engine.put_prompt(PROMPT)
    request, offered = hit(engine, "r")
    assert offered == 20
    stores: list[BlockJob] = computed(engine, request)
    assert stores == []


def test_a_chosen_request_in_many_steps_stays_within_four_blocks() -> None:
    engine = comparing(witness_share=1)
    engine.put_prompt(LONG)
    request = engine.ask("r", LONG)
    assert engine.match(request) == 0
    engine.half._witnessing.on_report(1, 5.0)
    total = 0
    for _ in range(8):
        orders = engine.step({"r": 16})
        request.num_computed_tokens += 16
        total += sum(store.witnesses for store in orders.stores)
    assert total == 4


def test_what_is_new_is_compared_within_the_budget() -> None:
    engine = comparing()
    request = engine.ask("r", LONG)
    assert engine.match(request) == 0
    allowed = engine.half._witnessing.allowed(engine.half._requests["r"])
    [store] = computed(engine, request)
    assert len(store.blocks) > allowed
    assert store.witnesses == allowed


def test_what_a_sibling_connector_loaded_is_not_the_engines_own() -> None:
    engine = comparing()
    first = engine.ask("first", PROMPT)
    assert engine.match(first) == 0
    computed(engine, first)
    engine.settle()
    engine.step({})
    second = engine.ask("second", [*PROMPT[:20], *LONG])
    assert engine.match(second, 0) == 20
    # Another part of a MultiConnector was taken for these tokens: nothing is loaded here.
    second.num_computed_tokens = 20
    assert not any(store.witnesses for store in computed(engine, second))
    engine.settle()
