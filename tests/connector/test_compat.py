"""What Penstock takes from vLLM's inside, where another platform than this one has it otherwise."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.sched.output import (
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)

from penstock.errors import ConfigError
from penstock.identity import WeightFiles
from penstock.vllm import compat, model_share, scheduler_facts
from penstock.vllm.compat.versions import installed


@pytest.fixture
def one_core() -> Any:
    """This thread, bound as vLLM binds a worker."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield {min(before)}
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_beside_a_gpu_threads_stay_on_the_cores_that_the_worker_was_bound_to(
    on_cpu: bool, one_core: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat.devices, "is_cpu", lambda: on_cpu)
    with compat.operators_cores():
        inside = os.sched_getaffinity(0)
    assert inside == (os.sched_getaffinity(os.getppid()) if on_cpu else one_core)
    assert os.sched_getaffinity(0) == one_core


def test_files_of_weights_are_digested_beside_the_cores_that_the_model_computes_on(
    one_core: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started_on = []
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1000))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    class Recorded(WeightFiles):
        def __init__(self, paths: Iterable[str | Path]) -> None:
            started_on.append(os.sched_getaffinity(0))
            super().__init__(paths)

    monkeypatch.setattr(compat.devices, "is_cpu", lambda: True)
    monkeypatch.setattr(model_share, "WeightFiles", Recorded)
    monkeypatch.setattr(model_share, "_under_way", {})
    model_share._digests_of([str(weights)])
    assert started_on == [os.sched_getaffinity(os.getppid())]
    assert os.sched_getaffinity(0) == one_core


def test_a_step_names_every_request_in_it_once() -> None:
    output = SchedulerOutput.make_empty()
    cached = output.scheduled_cached_reqs
    cached.req_ids, cached.num_computed_tokens = ["old"], [100]
    cached.new_block_ids = [([7],)]
    new = NewRequestData("new", [1] * 9, [], None, None, ([8, 9],), 16, None)
    output.scheduled_new_reqs.append(new)
    output.num_scheduled_tokens = {"new": 9, "old": 1}
    output.preempted_req_ids = {"gone"}
    tables = {"old": ([1, 7],), "new": ([8, 9],)}
    output.kv_connector_block_state = KVConnectorBlockState(set(tables), tables.__getitem__, {})
    step = scheduler_facts.step(output)
    assert (step.requests, step.computed) == (["old", "new"], [100, 16])
    assert step.tokens == {"new": 9, "old": 1}
    assert list(step.preempted) == ["gone"]
    assert step.tables("old") == ([1, 7],)
    assert sorted(step.new_blocks()) == [7, 8, 9]
    assert not step.is_empty


def caches(*dtypes: torch.dtype) -> KVCacheConfig:
    """A group for each type."""
    groups = [
        KVCacheGroupSpec(
            [f"model.layers.{i}.attn"],
            FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=dtype),
        )
        for i, dtype in enumerate(dtypes)
    ]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def speculative(
    method: str, *, modules: int = 1, parallel: bool = False, degree: int | None = None
) -> Any:
    """vLLM's configuration of a drafter."""
    from vllm.config import SpeculativeConfig

    config: Any = object.__new__(SpeculativeConfig)
    config.method, config.num_speculative_tokens = method, 2
    config.disable_eagle_block_drop = False
    config.draft_tensor_parallel_size, config.parallel_drafting = degree, parallel
    hf_config = SimpleNamespace(num_nextn_predict_layers=modules)
    config.draft_model_config = SimpleNamespace(
        hf_config=hf_config, use_mla=False, get_total_num_kv_heads=lambda: 2
    )
    return config


def engine(
    *,
    v2: bool = False,
    sleep: bool = False,
    cumem: bool = False,
    drafts: str = "",
    stages: int = 1,
    decode_ranks: int = 1,
    prefill_ranks: int = 1,
    own_scales: bool = False,
    kv_type: str = "auto",
    images_kept: float | None = None,
    finds_own: bool = True,
    **drafter: Any,
) -> Any:
    """`images_kept` are GiB for processed images; None for a model of text."""
    speculation = speculative(drafts, **drafter)
    images = None if images_kept is None else SimpleNamespace(mm_processor_cache_gb=images_kept)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=decode_ranks,
            prefill_context_parallel_size=prefill_ranks,
            pipeline_parallel_size=stages,
            tensor_parallel_size=2,
        ),
        speculative_config=speculation if drafts else None,
        cache_config=SimpleNamespace(
            calculate_kv_scales=own_scales,
            prefix_caching_hash_algo="sha256",
            block_size=16,
            cache_dtype=kv_type,
            enable_prefix_caching=finds_own,
        ),
        model_config=SimpleNamespace(
            enable_sleep_mode=sleep,
            enable_cumem_allocator=cumem,
            multimodal_config=images,
            get_total_num_hidden_layers=lambda: 2,
        ),
        use_v2_model_runner=v2,
    )


UNIFORM, MIXED = (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("config", "dtypes", "reason"),
    [
        (engine(images_kept=0, finds_own=False), UNIFORM, "images without names"),
        (engine(drafts="dflash"), UNIFORM, "by dflash, which keeps other states"),
        (engine(drafts="extract_hidden_states"), UNIFORM, "keeps other states"),
        (engine(drafts="mtp", modules=2), UNIFORM, "MTP with several modules"),
        (engine(drafts="draft_model", parallel=True), UNIFORM, "parallel drafting"),
        (engine(drafts="eagle", degree=1), UNIFORM, "a drafter over 1 tensor-parallel ranks of 2"),
        (engine(drafts="ngram", stages=2), UNIFORM, "over several pipeline stages"),
        (
            engine(decode_ranks=2),
            UNIFORM,
            r"decode context parallelism, .* only some of a block's tokens .* Switch it off",
        ),
        (
            engine(prefill_ranks=2),
            UNIFORM,
            r"prefill context parallelism, .* \(--prefill-context-parallel-size 1 has them all\)",
        ),
        (engine(own_scales=True), UNIFORM, "KV scales calculated at run time"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    config: Any, dtypes: tuple[torch.dtype, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        compat.transfer_groups(config, caches(*dtypes))


@pytest.mark.parametrize(
    ("config", "option"),
    [(engine(sleep=True), "sleep mode"), (engine(cumem=True), "--enable-cumem-allocator")],
)
def test_sleep_is_refused_where_vllm_does_not_tell_of_it(
    config: Any, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = type(installed())
    monkeypatch.setattr(version, "TELLS_BEFORE_SLEEP", False)
    with pytest.raises(ConfigError, match=option):
        compat.transfer_groups(config, caches(*UNIFORM))
    monkeypatch.setattr(version, "TELLS_BEFORE_SLEEP", True)
    assert compat.transfer_groups(config, caches(*UNIFORM))


def test_prompts_are_held_back_as_the_installed_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(interval: int, peers: int) -> bool:
        return compat.holds_prompts(
            SimpleNamespace(
                scheduler_config=SimpleNamespace(prefill_schedule_interval=interval),
                parallel_config=SimpleNamespace(data_parallel_size=peers),
            )
        )

    # vLLM before 0.33 does so in its loop for data-parallel experts alone.
    by_itself = "local_prefill_interval" in inspect.getsource(Scheduler)
    assert by_itself == installed().HOLDS_PROMPTS_ALONE
    for alone in (False, True):
        monkeypatch.setattr(type(installed()), "HOLDS_PROMPTS_ALONE", alone)
        assert holds(4, 1) is alone
        assert holds(4, 2)
        assert not holds(1, 1)
        assert not holds(1, 2)


def test_gpus_of_other_makers_are_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
    with pytest.raises(ConfigError, match=r"AMD GPUs \(ROCm\): copies are made for CUDA"):
        compat.transfer_groups(engine(), caches(*UNIFORM))


def test_kernels_that_ask_the_configuration_for_their_block_size_find_it() -> None:
    """As FlashAttention 4 does, which takes special sizes with some heads."""

    class Asking:
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
            config = get_current_vllm_config_or_none()
            return [16] if config is None else [64]

        @staticmethod
        def get_name() -> str:
            return "ASKING"

    config: Any = SimpleNamespace(cache_config=SimpleNamespace(block_size=64))
    assert compat.kernel_block_size(config, [Asking]) == 64
    assert get_current_vllm_config_or_none() is None


@pytest.mark.parametrize(
    ("config", "dtypes"),
    [
        (engine(), MIXED),
        (engine(v2=True), MIXED),
        (engine(v2=True), UNIFORM),
        (engine(), UNIFORM),
        (engine(stages=2), UNIFORM),
        (engine(drafts="ngram"), UNIFORM),
        (engine(images_kept=0), UNIFORM),
        (engine(images_kept=4, finds_own=False), UNIFORM),
        (engine(finds_own=False), UNIFORM),
    ],
)
def test_what_can_be_followed_is_not(config: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    assert len(compat.transfer_groups(config, caches(*dtypes))) == 2


def test_blocks_are_held_where_vllm_zeroes_them_early() -> None:
    assert compat.zeroes_early(engine(v2=True), caches(*MIXED))
    assert not compat.zeroes_early(engine(v2=True), caches(*UNIFORM))
    assert not compat.zeroes_early(engine(), caches(*MIXED))


def test_layers_of_a_group_are_alike_or_refused() -> None:
    def group(*dtypes: torch.dtype) -> KVCacheConfig:
        config = caches(*dtypes)
        specs = {each.layer_names[0]: each.kv_cache_spec for each in config.kv_cache_groups}
        both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
        config.kv_cache_groups = [KVCacheGroupSpec(list(specs), both)]
        return config

    (found,) = compat.transfer_groups(engine(), group(*UNIFORM))
    assert (found.dtype, len(found.layer_names)) == ("torch.bfloat16", 2)
    with pytest.raises(ConfigError, match="their pages differ in size or type: leave out"):
        compat.transfer_groups(engine(), group(torch.bfloat16, torch.float32))


@pytest.mark.parametrize(
    ("model", "kv_type", "is_read"),
    [
        (torch.float32, "auto", True),
        (torch.bfloat16, "fp8", True),
        (torch.bfloat16, "fp8_e4m3", True),
        (torch.bfloat16, "fp8_e5m2", True),
        # The model's own type, by its name.
        (torch.bfloat16, "bfloat16", True),
        (torch.float16, "float16", True),
        (torch.float32, "bfloat16", False),
        (torch.float32, "float16", False),
        (torch.float16, "bfloat16", False),
        (torch.bfloat16, "fp8_per_token_head", False),
        (torch.bfloat16, "int8_per_token_head", False),
        (torch.bfloat16, "int4_per_token_head", False),
        (torch.bfloat16, "nvfp4", False),
        (torch.bfloat16, "turboquant_k8v4", False),
    ],
)
def test_types_that_no_kernel_for_cpus_reads_are_refused(
    model: torch.dtype, kv_type: str, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = SimpleNamespace(kv_cache_dtype=kv_type, get_attn_backend=lambda: CPUAttentionBackend)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=model),
        compilation_config=SimpleNamespace(static_forward_context={"here": layer}),
    )
    # A layer of another rank is that rank's.
    names = ["here", "elsewhere"]
    if is_read:
        compat.check_kv_types(config, names)
        return
    own = str(model).removeprefix("torch.")
    with pytest.raises(ConfigError, match=f"CPU_ATTN .* only, where auto is the model's {own}"):
        compat.check_kv_types(config, names)
    # vLLM asks the backends for GPUs itself.
    monkeypatch.setattr(compat.backends, "is_cpu", lambda: False)
    compat.check_kv_types(config, names)


@pytest.mark.parametrize(
    ("estimate", "left"),
    [
        ({}, 50 - 8),
        ({"cudagraph_memory_estimate": 0}, 50 - 8),
        ({"cudagraph_memory_estimate": 3 << 30}, 50 - 8 - 3),
    ],
)
def test_what_graphs_will_take_is_not_room_for_kv(
    estimate: dict[str, int], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat.memory, "is_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 << 30, 80 << 30))
    named = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: named)
    cache = SimpleNamespace(gpu_memory_utilization=0.9)
    worker = SimpleNamespace(device="cuda:0", cache_config=cache, **estimate)
    room = compat.memory._room(worker)
    assert room.free >> 20 == left << 10
