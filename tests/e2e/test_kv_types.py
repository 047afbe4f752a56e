"""The types in which vLLM keeps KV: what comes from the pool is vLLM's own hit, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.node import Node

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "fp8_e4m3"), ("bfloat16", "fp8_e5m2")],
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
        first.wait_for("stored_blocks", 3 * len(prompts) - 1)
    with start(llama, pool=pool, **options) as second:
        loaded = [second.ask(prompt) for prompt in prompts]
        assert second.counters()["loaded_tokens"] == sum(answer.cached for answer in own)
    assert [answer.text for answer in loaded] == [answer.text for answer in own]
    # Of another type, nothing is found.
    with start(llama, pool=pool, dtype="float32") as other:
        assert other.ask(prompts[0]).cached == 0
