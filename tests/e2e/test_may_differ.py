"""For every line of the list of what may differ: two engines that differ in it store the same
bytes under the same keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Node
from penstock.vllm.compat import MAY_DIFFER
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored

pytestmark = pytest.mark.e2e

PROMPTS = [tokens(4 * BLOCK + 9, seed=81), tokens(2 * BLOCK + 60, seed=82)]
HEADER_BYTES = 64
BLOCKS = 4 + 2

# What one engine can have at once.
VARIED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "schedule, memory, text": (
        {
            "max_num_seqs": 3,
            "scheduling_policy": "priority",
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 64 << 20,
            "gpu_memory_utilization": 0.5,
            "load_format": "safetensors",
            "trust_remote_code": True,
            "enable_prompt_embeds": True,
            "renderer_num_workers": 2,
            "disable_cascade_attn": True,
            "performance_mode": "throughput",
        },
        {
            "scheduler_config",
            "model_config.max_model_len",
            "cache_config.kv_cache_memory_bytes",
            "cache_config.gpu_memory_utilization*",
            "cache_config.num_*_blocks*",
            "cache_config.kv_cache_*concurrency",
            "cache_config.kv_cache_size_tokens",
            "load_config",
            "model_config.trust_remote_code",
            "model_config.enable_prompt_embeds",
            "model_config.renderer_num_workers",
            "model_config.disable_cascade_attn",
            "performance_mode",
        },
    ),
    "what others see, and what comes after": (
        {
            "seed": 7,
            "max_logprobs": 5,
            "logprobs_mode": "raw_logits",
            "generation_config": "vllm",
            "override_generation_config": {"top_k": 5},
            "served_model_name": "other",
            "allowed_media_domains": ["example.org"],
            "structured_outputs_config": {"backend": "xgrammar"},
            "kv_cache_metrics": True,
            "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
            "profiler_config": {"profiler": "torch", "torch_profiler_dir": "/nowhere"},
            "shutdown_timeout": 5,
        },
        {
            "model_config.seed",
            "model_config.max_logprobs",
            "model_config.logprobs_mode",
            "model_config.generation_config",
            "model_config.override_generation_config",
            "model_config.served_model_name",
            "model_config.allowed_*",
            "structured_outputs_config",
            "observability_config",
            "kv_events_config",
            "profiler_config",
            "shutdown_timeout",
            "instance_id",
        },
    ),
    "no cache of its own": (
        {"enable_prefix_caching": False},
        {"cache_config.enable_prefix_caching"},
    ),
    "adapters": (
        {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32, "max_cpu_loras": 3},
        {"lora_config.set", "lora_config.max_*"},
    ),
    "proposed tokens": (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
            }
        },
        {
            "speculative_config",
            "speculative_config.num_speculative_tokens*",
            "speculative_config.prompt_lookup_*",
        },
    ),
}
"""Engines that differ, and the lines that they show."""

ROUNDS = "changes rounding"
"""Which is why its line is on the list. The same tokens are shown by tests of parallel engines, not
the same bits."""
TOLD = "is another fact"
GPU = "has no effect on CPUs"
IMAGES = "is about prompts with images; tests/e2e/test_images.py shows what they share"
DRAFTER = "is about a drafter, whose tokens the model checks"
WORKED_OUT = "is worked out by vLLM, from what is told"
TEXT = "makes tokens, or names for them, before there is a request"

NOT_VARIED = {
    "watchdog_config": "watches engines since vLLM 0.33, which is not the one of all tests",
    "cache_config.simple_cpu_offload_num_blocks": WORKED_OUT,
    **dict.fromkeys((line for line, reason in MAY_DIFFER.items() if "rounding" in reason), ROUNDS),
    **dict.fromkeys(
        (line for line, reason in MAY_DIFFER.items() if "another fact" in reason), TOLD
    ),
    **dict.fromkeys(
        (line for line, reason in MAY_DIFFER.items() if "worked out" in reason), WORKED_OUT
    ),
    **dict.fromkeys((line for line in MAY_DIFFER if "multimodal_config" in line), IMAGES),
    **dict.fromkeys((line for line in MAY_DIFFER if line.startswith("speculative_")), DRAFTER),
    **dict.fromkeys((line for line in MAY_DIFFER if "tokenizer" in line), TEXT),
    **dict.fromkeys((line for line in MAY_DIFFER if line.startswith("ec_transfer")), IMAGES),
    "offload_config": GPU,
    "model_config.*sleep*": GPU,
    "model_config.enable_nccl_comm_suspend": GPU,
    "model_config.enable_cumem_allocator": GPU,
    "cache_config.kv_offloading_*": "vLLM takes it for a connector of its own, in Penstock's place",
    "cache_config.prefix_*": "is of kinds of layers that this model lacks",
    "ec_manager_config": IMAGES,
    "lora_config.default_mm_loras": IMAGES,
    "logging_config": "vLLM's log; each test of this project has another",
    "reasoning_config": TEXT,
    "watermark_config": "draws tokens, which a request without it does not see",
    "aux_output_config": "is of models with experts",
    "quant_config": "is made of options that are told",
    "model_config.use_fp64_gumbel": GPU,
    "model_config.logits_processors": "names code that draws tokens",
    "model_config.return_sampling_mask": "needs a sampler that CPUs lack",
    "model_config.enable_return_routed_experts": "is of models with experts",
    "model_config.enable_trace_replay": "needs a trace",
    "model_config.hf_token": "is not used with a folder",
    "model_config.io_processor_plugin": "needs a plug-in",
    "model_config.spec_target_max_model_len": DRAFTER,
}
"""Lines that no engine here can show, each with the reason."""


def test_every_line_is_shown_or_it_says_why_not() -> None:
    shown = set().union(*(lines for _, lines in VARIED.values()))
    assert shown | NOT_VARIED.keys() == MAY_DIFFER.keys()


def stored(node: Node, folder: Path) -> dict[str, bytes]:
    """What an engine puts into its pool: the payloads by their keys."""
    before = node.counters()
    for prompt in PROMPTS:
        node.ask(prompt)
    all_stored(node, BLOCKS, since=before)
    size = 1 << 16
    files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > size)
    # A header names the engine that has computed the payload.
    return {str(path.relative_to(folder)): path.read_bytes()[HEADER_BYTES:] for path in files}


@pytest.fixture(scope="module")
def usual(
    llama: Path, start: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("usual") / "pool"
    with start(llama, pool=f"file://{folder}?size=1GiB") as node:
        return stored(node, folder)


@pytest.mark.parametrize("what", VARIED)
def test_kv_is_the_same_bit_for_bit(
    what: str,
    usual: dict[str, bytes],
    llama: Path,
    start: Callable[..., Node],
    tmp_path: Path,
) -> None:
    options, _ = VARIED[what]
    if "profiler_config" in options:
        options |= {"profiler_config": {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}}
    folder = tmp_path / "pool"
    with start(llama, pool=f"file://{folder}?size=1GiB", **options) as node:
        found = stored(node, folder)
    assert len(usual) >= BLOCKS
    assert found.keys() == usual.keys()
    assert found == usual
