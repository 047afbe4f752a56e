"""The types in which vLLM keeps KV: what comes from the pool is vLLM's own hit, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from lab.engines.node import Node, StartError
from lab.models import attention
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored

pytestmark = pytest.mark.e2e

FP8 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM keeps FP8 only on CPUs with AVX-512"
)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [
        ("bfloat16", "auto"),
        ("float16", "auto"),
        pytest.param("bfloat16", "bfloat16", marks=pytest.mark.soak),
        pytest.param("bfloat16", "fp8_e4m3", marks=FP8),
        pytest.param("bfloat16", "fp8_e5m2", marks=FP8),
    ],
)
def test_a_loaded_prompt_is_vllms_own_hit(
    dtype: str, kv_cache_dtype: str, llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    prompts = [tokens(3 * BLOCK + 11 * number, seed=700 + number) for number in range(4)]
    with start(llama, pool=pool, **options) as first:
        for prompt in prompts:
            first.ask(prompt)
        own = [first.ask(prompt) for prompt in prompts]
        all_stored(first, 3 * len(prompts))
    with start(llama, pool=pool, **options) as second:
        loaded = [second.ask(prompt) for prompt in prompts]
        assert second.counters()["loaded_tokens"] == sum(answer.cached for answer in own)
    assert [answer.text for answer in loaded] == [answer.text for answer in own]
    # Of another type, nothing is found.
    with start(llama, pool=pool, dtype="float32") as other:
        assert other.ask(prompts[0]).cached == 0


@FP8
def test_groups_may_differ_in_type(start: Callable[..., Node], tmp_path: Path) -> None:
    gemma = attention.gemma2(tmp_path / "model")
    options = {
        "pool": f"file://{tmp_path}/pool?size=1GiB",
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8_e4m3",
        "kv_cache_dtype_skip_layers": ["sliding_window"],
    }
    prompts = [tokens(5 * BLOCK + 11 * number, seed=730 + number) for number in range(3)]
    with start(gemma, **options) as first:
        for prompt in prompts:
            first.ask(prompt)
        own = [first.ask(prompt) for prompt in prompts]
        assert first.counters().get("loaded_tokens", 0) == 0
        # vLLM makes three groups of these layers.
        all_stored(first, 3 * len(prompts) * 5)
    with start(gemma, **options) as second:
        loaded = [second.ask(prompt) for prompt in prompts]
        assert second.counters()["loaded_tokens"] == (4 + 5 + 5) * BLOCK
    assert [answer.cached for answer in own] == [4 * BLOCK, 5 * BLOCK, 5 * BLOCK]
    assert [answer.text for answer in loaded] == [answer.text for answer in own]


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [("float32", "bfloat16"), ("bfloat16", "int8_per_token_head"), ("bfloat16", "nvfp4")],
)
def test_types_that_vllm_takes_and_its_kernels_misread_are_refused(
    dtype: str, kv_cache_dtype: str, llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    # vLLM refuses them by itself since 0.33, before it starts Penstock.
    by_penstock = f"--kv-cache-dtype {kv_cache_dtype}: .* CPU_ATTN .* only"
    with pytest.raises(StartError, match=None if is_newer() else by_penstock):
        start(
            llama,
            pool=f"file://{tmp_path}/pool?size=1GiB",
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
        )


def is_newer() -> bool:
    import vllm

    return Version(vllm.__version__) >= Version("0.33")
