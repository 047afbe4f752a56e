"""Multi-head latent attention: one latent a token, stored once whoever holds it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lab.engines.node import Node
from lab.models import attention
from lab.waiting import eventually
from tests.e2e.conftest import tokens

pytestmark = pytest.mark.e2e

BLOCK = 16
"""vLLM's default block size for MLA on CPU."""

BLOCK_BYTES = 2 * (512 + 64) * 4 * BLOCK
"""Layers, latent and rotary part, bytes of float32, tokens."""

PREFIX = tokens(20 * BLOCK, seed=1)
PROMPTS = [[*PREFIX, *tokens(left, seed=left)] for left in (1, 7, BLOCK, 3 * BLOCK + 5)]
"""By what a load of the prefix leaves."""

OWN_HITS = "lab.engines.mla_on_cpu:right_rotary_and_own_hits"
AS_IT_IS = "lab.engines.mla_on_cpu:right_rotary"


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return attention.deepseek_v2(tmp_path_factory.mktemp("deepseek"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loaded_prompt_is_vllms_own_hit(
    ranks: int, deepseek: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    options = attention.LATENT_ENGINE | {
        "tensor_parallel_size": ranks,
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))},
    }
    first_pool, pool = tmp_path / "first", tmp_path / "pool"
    with start(deepseek, pool=f"file://{first_pool}?size=1GiB", prepare=OWN_HITS, **options) as a:
        cold = a.ask(PROMPTS[1])
        a.wait_for("stored_blocks", 20)
        assert a.counters()["stored_bytes"] == 20 * BLOCK_BYTES
        shutil.copytree(first_pool, pool)
        own = [a.ask(prompt) for prompt in PROMPTS]
        assert a.counters().get("loaded_tokens", 0) == 0
    # Without hits of its own, as vLLM is on a CPU.
    with start(deepseek, pool=f"file://{pool}?size=1GiB", prepare=AS_IT_IS, **options) as b:
        loaded = [b.ask(prompt) for prompt in PROMPTS]
        assert b.counters()["loaded_tokens"] == len(PROMPTS) * 20 * BLOCK
        assert "KV layout L" in b.log.read_text()
    assert [answer.cached for answer in (*own, *loaded)] == [20 * BLOCK] * 2 * len(PROMPTS)
    assert [answer.text for answer in loaded] == [answer.text for answer in own]
    assert loaded[1].tokens == cold.tokens


def stored_in(folder: Path, count: int) -> set[Path]:
    """The blocks in a pool, once there are so many."""

    def found() -> set[Path]:
        return {
            path
            for path in folder.rglob("*.*")
            if path.parent.name != "tmp" and path.stat().st_size == BLOCK_BYTES + 64
        }

    eventually(lambda: len(found()) == count, lambda: len(found()))
    return found()


def test_after_a_damaged_latent_all_is_recomputed(
    deepseek: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    folder = tmp_path / "pool"
    options = attention.LATENT_ENGINE | {"pool": f"file://{folder}?size=1GiB", "prepare": AS_IT_IS}
    with start(deepseek, **options) as first:
        first.ask([*PREFIX[: 10 * BLOCK], 7])
        leading = stored_in(folder, 10)
        cold = first.ask([*PREFIX, 7], params={"penstock.load_policy": "never"})
        damaged = min(stored_in(folder, 20) - leading)
        assert first.counters().get("loaded_tokens", 0) == 0
    content = bytearray(damaged.read_bytes())
    content[5000] ^= 1
    damaged.write_bytes(content)
    with start(deepseek, **options) as second:
        answer = second.ask([*PREFIX, 7])
        assert answer.tokens == cold.tokens
        counters = second.counters()
        assert counters["rejected_objects"] == 1
        assert 10 * BLOCK <= counters["loaded_tokens"] < 20 * BLOCK


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM has AMX_MLA only on CPUs with AMX"
)
def test_with_amx_a_loaded_prompt_is_vllms_own_hit_too(
    deepseek: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    options = {
        "pool": f"file://{tmp_path}/pool?size=1GiB",
        "dtype": "bfloat16",
        # AMX_MLA wants a multiple of 32.
        "block_size": 2 * BLOCK,
    }
    with start(deepseek, **options) as first:
        for prompt in PROMPTS:
            first.ask(prompt)
        own = [first.ask(prompt) for prompt in PROMPTS]
        first.wait_for("stored_blocks", 11)
        assert "Using AMX_MLA backend" in first.log.read_text()
    with start(deepseek, **options) as second:
        loaded = [second.ask(prompt) for prompt in PROMPTS]
        assert second.counters()["loaded_tokens"] >= 20 * BLOCK
    assert [a.cached for a in loaded] == [a.cached for a in own] == [20 * BLOCK] * 3 + [22 * BLOCK]
    assert [answer.text for answer in loaded] == [answer.text for answer in own]


def test_a_model_that_writes_into_its_configuration_shares_whoever_has_it(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    """With YaRN it notes there which kind it takes. One rank has its configuration in common with
    the scheduler, and two have copies."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    model = attention.deepseek_v2(
        tmp_path / "model", rope_parameters=yarn | {"rope_theta": 10000.0, "mscale_all_dim": 1.0}
    )
    options = attention.LATENT_ENGINE | {"pool": f"file://{tmp_path}/pool?size=1GiB"}
    with start(model, prepare=AS_IT_IS, **options) as one:
        one.ask(PROMPTS[1])
        one.wait_for("stored_blocks", 20)
    two_ranks = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    with start(model, prepare=AS_IT_IS, **options, **two_ranks) as two:
        assert two.ask(PROMPTS[1]).cached == 20 * BLOCK
