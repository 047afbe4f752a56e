"""What the planner says blocks take, against vLLM's own functions; no engine is started."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.plan import config
from penstock.plan.kv import KvSizes, Serving
from penstock.plan.model import Model
from tests.plan.test_kv import DEEPSEEK, GEMMA2, LLAMA

pytestmark = pytest.mark.e2e

BLOCK = 32
LENGTH = 8192
BATCHED = 2048
GEMMA3 = GEMMA2 | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
MODELS: dict[str, dict[str, Any]] = {
    "gqa": LLAMA | {"architectures": ["LlamaForCausalLM"]},
    "two kinds": GEMMA2 | {"architectures": ["Gemma2ForCausalLM"]},
    "five to one": GEMMA3 | {"architectures": ["Gemma3ForCausalLM"]},
    "mla": DEEPSEEK | {"architectures": ["DeepseekV3ForCausalLM"]},
}
STAGES = {"gqa": (48, 16), "two kinds": (5, 20, 1), "five to one": (20, 14), "mla": (30, 31)}


def specs_of(model: Model) -> dict[str, Any]:
    """vLLM's specs of a model's layers, by name."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    found: dict[str, Any] = {}
    for layer, each in enumerate(model.layers):
        kv = each.kv
        assert kv is not None
        sizes: dict[str, Any] = {"block_size": BLOCK, "dtype": torch.bfloat16}
        name = f"model.layers.{layer}.self_attn.attn"
        if kv.kind == "mla":
            found[name] = MLAAttentionSpec(num_kv_heads=1, head_size=kv.content, **sizes)
            continue
        sizes |= {"num_kv_heads": kv.heads, "head_size": kv.content // 2}
        found[name] = (
            FullAttentionSpec(**sizes)
            if kv.window is None
            else SlidingWindowSpec(**sizes, sliding_window=kv.window)
        )
    return found


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_and_requests_take_what_vllm_says(name: str, layout: str, llama: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from penstock.vllm import compat

    # Any model's configuration serves: only lengths and layout are asked of it.
    vllm_config = EngineArgs(
        model=str(llama),
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_batched_tokens=BATCHED,
        pipeline_parallel_size=2,
    ).create_engine_config()
    vllm_config.model_config.max_model_len = LENGTH
    vllm_config.cache_config.kv_cache_layout = layout
    model = config.estimate(json.loads(json.dumps(MODELS[name])))
    sizes = KvSizes(
        model,
        Serving(
            block_size=BLOCK,
            max_length=LENGTH,
            batched_tokens=BATCHED,
            concurrent_batches=vllm_config.max_concurrent_batches,
        ),
    )
    assert vllm_config.max_concurrent_batches > 1
    ends = list(itertools.accumulate(STAGES[name]))
    assert ends[-1] == len(model.layers)
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    specs = list(specs_of(model).items())
    stages = [dict(specs[start:end]) for start, end in ranges]
    assert compat.block_bytes(vllm_config, stages) == [sizes.block_bytes(*r) for r in ranges]
    assert compat.request_blocks(vllm_config, stages) == sizes.request_blocks()
