"""Weights that change in ways that are easily missed: unseen, halfway, twice, and back again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.waiting import LIMIT, eventually
from penstock.errors import ConfigError
from penstock.vllm import model_share
from penstock.vllm.messages import ModelShares, RankWeights
from penstock.vllm.model_facts import shared_facts
from penstock.vllm.settings import Settings
from penstock.vllm.tensors import digest_tensors, sample_tensors
from penstock.vllm.worker import Reading
from tests.connector.engine import PlainEngine
from tests.connector.ranks import Rank, blocks, job
from tests.connector.test_weight_versions import (
    FULL,
    RANK,
    TOKENS,
    Memory,
    begun,
    now,
    share,
    told,
    updated,
)


@pytest.fixture
def engines(tmp_path: Path) -> Callable[..., PlainEngine]:
    """Starts engines over one pool."""
    return functools.partial(PlainEngine, [FULL], pool=f"file://{tmp_path}/pool?size=64MiB")


def test_weights_that_changed_unseen_before_anything_was_read_are_not_those_of_the_start() -> None:
    """The first that anybody sees is a sample that differs, at a reset."""
    memory = Memory()
    weights, seen = begun(memory)
    memory.tensors[0] = 1
    weights.look()
    assert seen
    assert now(weights) != "files:start"


def test_weights_that_changed_unseen_before_the_first_update() -> None:
    """Code in the worker wrote into a tensor; then somebody reloads with the same."""
    memory = Memory()
    weights, _ = begun(memory)
    memory.tensors[0] = 1
    weights.note_change()
    weights.note_change()
    assert now(weights) != "files:start"


def test_a_name_is_of_the_sample_of_its_time() -> None:
    """A trainer writes into tensors past vLLM, and says so by a name."""
    memory = Memory()
    weights, _ = begun(memory)
    weights.note_change()
    memory.tensors[0] = 1
    weights.note_change()
    assert now(weights, "one") == "version:one:sample:1"
    memory.tensors[0] = 2
    assert now(weights, "two") == "version:two:sample:2"


def test_tenants_namespaces_that_are_still_the_engines_are_not_left(
    engines: Callable[..., PlainEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(weight_updates="drop")
    retired: list[bytes] = []
    monkeypatch.setattr(
        engine.half._retiring, "retire", lambda namespaces, stays: retired.extend(namespaces)
    )
    salt = b"s"
    request = engine.ask("a", TOKENS, params={"penstock.tenant": "t"}, salt=salt)
    assert engine.match(request) == 0
    engine.step({"a": request.num_tokens})
    engine.settle()
    own = engine.agreement.namespaces_of("t")
    # The same weights again, as after sleep.
    updated(engine, "files:start", count=1)
    retired.clear()
    request = engine.ask("b", TOKENS, params={"penstock.tenant": "t"}, salt=salt)
    engine.match(request)
    engine.step({"b": request.num_tokens})
    engine.settle()
    own = engine.agreement.namespaces_of("t")
    updated(engine, "files:start", count=2)
    assert engine.agreement.namespaces_of("t") == own
    assert not set(own) & set(retired)


def test_host_memory_is_known_again_when_the_weights_are_those_of_before() -> None:
    """The engine left its namespaces and came back before any job, as after sleep. The scheduler
    half believes only reports with its own count."""
    rank = Rank(Settings("memory://?size=64MiB", host_tier=True, host_bytes=1 << 20))
    try:
        rank.run(stores=[job(1, blocks((0, 0)))])
        assert rank.run(weights=2, stores=[job(2, blocks((1, 1)))]).weights == 2
    finally:
        rank.half.shutdown()


def test_a_description_that_is_under_way_does_not_bring_old_namespaces_back() -> None:
    """Descriptions are made on a thread of their own, from the agreement that is renewed."""
    main, waits, goes = threading.current_thread(), threading.Event(), threading.Event()
    engine = PlainEngine([FULL])
    agreement = engine.agreement

    def seed() -> bytes:
        if threading.current_thread() is not main:
            waits.set()
            goes.wait(LIMIT)
        return b"seed"

    agreement._hash_seed = seed
    agreement.renew({RANK: ModelShares(share("tensors:a"))})
    thread = threading.Thread(target=agreement.describe)
    thread.start()
    waits.wait(LIMIT)
    of_a = agreement.namespaces
    agreement.renew({RANK: ModelShares(share("tensors:b"))})
    goes.set()
    thread.join(LIMIT)
    assert agreement.namespaces != of_a


def test_kv_of_a_time_when_nobody_knew_the_weights_is_left_too(
    engines: Callable[..., PlainEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    retired: list[bytes] = []
    monkeypatch.setattr(
        engine.half._retiring, "retire", lambda namespaces, stays: retired.extend(namespaces)
    )
    # Asleep, or reset in a `MultiConnector`: nobody asks.
    engine.half.versions.on_changed({"worker": 1})
    request = engine.ask("a", TOKENS)
    engine.match(request)
    engine.step({"a": request.num_tokens})
    engine.settle()
    stored = any(orders.stores for orders in engine.orders)
    own = engine.agreement.namespaces
    engine.half.versions.on_told(told(1, "tensors:new"))
    assert not stored or set(own) <= set(retired)


@pytest.mark.parametrize("error", [PermissionError, OSError, AttributeError, KeyError])
def test_weights_that_cannot_be_read_for_any_reason(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine ends: it asks when a request comes."""

    def fail(*_: object) -> ModelShares:
        raise error("gone")

    monkeypatch.setattr(model_share, "_shares", fail)
    assert model_share.live_models(None, Reading.SAMPLE) is None


def test_code_that_is_replaced_while_the_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs is the code of the start."""
    import torch

    file = tmp_path / "model.py"
    file.write_text("old")
    monkeypatch.setattr(model_share.compat, "own_code", lambda _: {"model": str(file)})
    model = torch.nn.Linear(2, 2)
    before = model_share._share(model, torch.float32, "w")
    file.write_text("new")
    assert model_share._share(model, torch.float32, "w") == before


def test_a_removal_that_failed_is_not_counted(
    engines: Callable[..., PlainEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.vllm.scheduler import retiring

    def fail(*_: object, **__: object) -> int:
        raise ConfigError("the store is away")

    monkeypatch.setattr(retiring, "remove_namespace", fail)
    engine = engines(weight_updates="drop")
    updated(engine, "tensors:a", count=1)
    eventually(lambda: not engine.half._retiring._errands._is_running)
    assert not (engine.half.take_counts() or {}).get("dropped_namespaces")


def test_a_second_engine_in_a_process_may_call_its_workers_before_it_has_a_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM does, when it fits the longest prompt to the memory (`update_max_model_len`)."""
    from types import SimpleNamespace

    from vllm.v1.engine.core import EngineCore

    from penstock.vllm.compat import changes

    monkeypatch.setattr(changes, "has_penstock", lambda _: True)
    changes.wrap_calls()
    core = EngineCore.__new__(EngineCore)
    core.vllm_config = None
    core.model_executor = SimpleNamespace(
        is_sleeping=False, collective_rpc=lambda *_, **__: [({}, False)]
    )
    EngineCore.collective_rpc(core, "update_max_model_len", args=(1,))


@pytest.mark.parametrize("comes", ["before the update", "while it goes on"])
def test_a_request_without_blocks_is_not_stale_after_a_reset(
    comes: str, engines: Callable[..., PlainEngine]
) -> None:
    engine = engines()
    versions = engine.half.versions
    if comes == "before the update":
        engine.ask("a", TOKENS)
    versions.on_changed({"worker": 1})
    versions.on_update(is_under_way=True)
    if comes == "while it goes on":
        engine.ask("a", TOKENS)
    versions.on_changed({"worker": 2})
    versions.on_update(is_under_way=False)
    versions.on_told(told(2, "tensors:new"))
    engine.half._on_reset()
    waits = engine.requests["a"]
    engine.match(waits)
    engine.step({"a": waits.num_tokens})
    engine.settle()
    assert any(orders.stores for orders in engine.orders)


def test_what_the_engine_came_back_to_is_not_removed(
    engines: Callable[..., PlainEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.vllm.scheduler import retiring

    real, begins, goes = retiring.remove_namespace, threading.Event(), threading.Event()

    def slow(store: Any, namespace: bytes, **options: Any) -> int:
        begins.set()
        goes.wait(LIMIT)
        return real(store, namespace, **options)

    monkeypatch.setattr(retiring, "remove_namespace", slow)
    engine = engines(weight_updates="drop")
    updated(engine, "tensors:a", count=1)
    updated(engine, "tensors:b", count=2)  # a thread begins to remove the start's
    begins.wait(LIMIT)
    updated(engine, "tensors:a", count=3)  # and back to a, whose removal still waits
    (again,) = engine.agreement.namespaces
    engine.put_prompt(TOKENS)
    goes.set()
    eventually(lambda: not engine.half._retiring._errands._is_running, "all is removed")
    assert engine.half._store.list(again, timeout=5)


def test_ranks_that_read_other_files_do_not_end_the_engine(
    tmp_path: Path,
) -> None:
    engine = PlainEngine([FULL], ranks=2, pool=f"file://{tmp_path}/pool?size=64MiB")
    versions = engine.half.versions
    versions.on_changed({"one": 1, "two": 1})
    versions.on_told(
        [
            RankWeights("one", 1, (0, 0), ModelShares(share("files:a"))),
            RankWeights("two", 1, (1, 0), ModelShares(share("files:b"))),
        ]
    )


def test_ranks_whose_weights_nobody_can_read_start() -> None:
    shared_facts({(0, 0): share("alone:a"), (0, 1): share("alone:b")})


def test_weights_that_a_device_keeps_in_forms_of_its_own() -> None:
    """Triton's kernels for MXFP4 have an object in place of the parameter, as with gpt-oss. Others
    leave an empty parameter on the device."""
    import torch

    from penstock.vllm.compat.weights import hides_weights

    @dataclass
    class Packed:
        data: torch.Tensor

    experts = torch.nn.Module()
    experts.bias = torch.nn.Parameter(torch.ones(2))
    experts.w13_weight = Packed(torch.ones(4))
    linear = torch.nn.Module()
    linear.weight = torch.nn.Parameter(torch.empty(0, device="meta"))
    linear.packed = Packed(torch.ones(4))
    assert hides_weights(experts)
    assert hides_weights(linear)


def test_what_clients_call_their_arguments() -> None:
    from penstock.vllm.compat import changes

    class Worker:
        def greet(self, method: str, worker: str) -> str:
            return method + worker

    watched = functools.partial(changes._watched, "greet", True)
    assert watched(Worker(), method="a", worker="b") == "ab"


def test_an_element_with_a_stride() -> None:
    import torch

    digest_tensors([("scale", torch.zeros(4, 2)[:1, 0])], 1)
    sample_tensors([("scale", torch.zeros(4, 2)[:1, 0])])


def test_a_long_name_is_described() -> None:
    memory = Memory()
    weights, _ = begun(memory)
    names = ["x" * (1 << 20), "a\nb", "\ud800"]
    named = {now(weights, name) for name in names}
    assert len(named) == len(names)
    assert all(len(each) < 100 and each.isprintable() for each in named)
