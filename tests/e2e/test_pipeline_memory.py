"""KV memory of uneven pipeline stages on the real vLLM: what it holds, and what it takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from lab.engines.node import Answer, Node, StartError
from lab.models import attention
from penstock.plan import config
from penstock.plan.kv import KvSizes, Serving
from tests.e2e.conftest import tokens
from tests.e2e.test_parallel import QUICKLY_COMPILED

pytestmark = pytest.mark.e2e

BLOCK = 64
GIB = 1 << 30
PAGE = 128 << 10
"""A layer's part of a block: 64 tokens, 4 heads of 128, key and value, 16 bit."""
MERGED = 32 << 20
"""How much more than the KV cache its mapping may hold: the kernel merges neighbours."""
PROPORTIONAL = {"penstock.enable_pp_prop_kv_cache": True}


def proportional(total: int) -> dict[str, Any]:
    """The options for `total` bytes over both ranks, in proportion."""
    return {"additional_config": PROPORTIONAL, "kv_cache_memory_bytes": total}


@dataclass
class Seen:
    """What an engine said and took."""

    tokens: int
    memory: tuple[int, ...]
    """Bytes of each worker's KV cache that are really there, the largest first."""
    answer: Answer
    log: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 layers of 2 KiB a token each."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    return attention.llama(folder, hidden=512, layers=4, heads=4, kv_heads=4, dtype="bfloat16")


PROMPT = tokens(3 * BLOCK + 5, seed=1)


@pytest.fixture(scope="module")
def look(
    model: Path, start: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Seen]:
    """Starts an engine of two stages, asks it one prompt, and ends it."""

    def run(
        partition: str,
        *,
        served: Path = model,
        pool: Path | None = None,
        stored: int = 0,
        **args: Any,
    ) -> Seen:
        options: dict[str, Any] = {
            "dtype": "bfloat16",
            "block_size": BLOCK,
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "mp",
            **QUICKLY_COMPILED,
            "kv_cache_memory_bytes": GIB,
            # Of each rank without the flag, of both with it.
            "env": {
                "VLLM_PP_LAYER_PARTITION": partition,
                "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            },
        } | args
        if pool is not None:
            options["pool"] = f"file://{pool}?size=1GiB"
        with start(served, **options) as node:
            answer = node.ask(PROMPT)
            if stored:
                node.wait_for("stored_blocks", stored)
            log = node.log.read_text()
            # Nothing else of that size is in memory: the workers are those that have the most.
            processes = psutil.Process(node.process.pid).children(recursive=True)
            memory = sorted(map(_largest_anonymous, processes), reverse=True)[:2]
        said = re.findall(r"KV cache size: ([\d,]+) tokens", log)
        assert said, log[-3000:]
        return Seen(int(said[-1].replace(",", "")), tuple(memory), answer, log)

    return run


def _largest_anonymous(process: psutil.Process) -> int:
    """Resident bytes of the largest mapping that is no file and not the heap: the KV cache, which
    vLLM allocates and fills with zeros in one piece."""
    return max(m.rss for m in process.memory_maps(grouped=False) if m.path == "[anon]")


@pytest.fixture(scope="module")
def uniform(look: Callable[..., Seen]) -> Seen:
    return look("3,1")


def test_vllm_alone_holds_what_its_first_rank_holds(uniform: Seen) -> None:
    """Nothing is changed without the flag, and the plan's uniform split says the same."""
    assert uniform.tokens == 174_720
    assert "KV memory by pipeline rank" not in uniform.log
    assert uniform.memory == pytest.approx((2730 * 3 * PAGE, 2730 * PAGE), abs=MERGED)


def test_a_proportional_split_holds_the_sum(
    uniform: Seen, look: Callable[..., Seen], tmp_path: Path
) -> None:
    """3/1: 262,144 tokens in the same two GiB; then as much as 131,072 tokens need, in a new
    process that loads what the first has stored."""
    pool = tmp_path / "pool"
    found = look("3,1", **proportional(2 * GIB), pool=pool, stored=3)
    assert found.tokens == 262_144
    assert found.memory == pytest.approx((3 * GIB // 2, GIB // 2), abs=MERGED)
    assert found.answer.tokens == uniform.answer.tokens
    # The engine core says what it did, in the words of `penstock plan`.
    table = found.log[found.log.index("KV memory by pipeline rank") :]
    assert "174,720" in table
    assert "262,144" in table
    # What each rank holds of the longest request (4,096 tokens), before and after.
    for requests in (2730 / 64, 8192 / 64, 4096 / 64):
        assert f"{requests:.2f}x" in table

    asked = {"penstock.kv_cache_tokens": 131_072}
    exact = look("3,1", additional_config=asked, pool=pool)
    assert exact.tokens == 131_072
    assert exact.memory == pytest.approx((2048 * 3 * PAGE, 2048 * PAGE), abs=MERGED)
    assert exact.answer.cached == 3 * BLOCK
    assert exact.answer.tokens == uniform.answer.tokens


def test_the_same_tokens_take_two_thirds_of_the_memory(
    uniform: Seen, look: Callable[..., Seen]
) -> None:
    """3/1: what vLLM holds with a GiB set aside on each rank, in 4/3 GiB over both."""
    found = look("3,1", **proportional(4 * GIB // 3))
    assert found.tokens == uniform.tokens == 174_720
    assert found.memory == pytest.approx((2730 * 3 * PAGE, 2730 * PAGE), abs=MERGED)
    assert found.answer.tokens == uniform.answer.tokens


@pytest.mark.full
def test_seven_layers_and_one(
    look: Callable[..., Seen], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model") / "deep"
    deep = attention.llama(folder, hidden=512, layers=8, heads=8, kv_heads=4, dtype="bfloat16")
    sizes = KvSizes(
        config.estimate(config.load(deep)[0]), Serving(block_size=BLOCK, max_length=4096)
    )
    before = look("7,1", served=deep)
    after = look("7,1", served=deep, **proportional(2 * GIB))
    assert before.tokens == sizes.tokens(GIB // sizes.block_bytes(0, 7)) == 149_760
    assert after.tokens == sizes.tokens(2 * GIB // sizes.block_bytes(0, 8)) == 262_144
    assert after.memory == pytest.approx((7 * GIB // 4, GIB // 4), abs=MERGED)
    assert after.answer.tokens == before.answer.tokens


def test_a_stage_without_attention_layers(
    uniform: Seen, look: Callable[..., Seen], tmp_path: Path
) -> None:
    """4/0: vLLM alone divides by the second stage's bytes a block, which are none."""
    pool = tmp_path / "pool"
    first = look("4,0", **proportional(2 * GIB), pool=pool, stored=3)
    assert first.tokens == 262_144
    assert first.memory[0] == pytest.approx(2 * GIB, abs=MERGED)
    assert first.answer.tokens == uniform.answer.tokens
    second = look("4,0", **proportional(2 * GIB), pool=pool)
    assert second.answer.cached == 3 * BLOCK
    assert second.answer.tokens == uniform.answer.tokens


def test_more_than_there_is_does_not_start(look: Callable[..., Seen]) -> None:
    asked = {"penstock.kv_cache_tokens": 1 << 18}
    with pytest.raises(StartError, match=r"need 2,147,483,648 bytes .* allows 1,073,741,824"):
        look("3,1", additional_config=asked)


def test_the_flag_needs_a_total(look: Callable[..., Seen]) -> None:
    """vLLM alone would take what each device has free: there is nothing to divide."""
    says = "--enable-pp-prop-kv-cache requires --kv-cache-memory-bytes"
    with pytest.raises(StartError, match=says):
        look(
            "3,1",
            additional_config=PROPORTIONAL,
            kv_cache_memory_bytes=None,
            gpu_memory_utilization=0.05,
        )


def test_a_stage_without_layers_of_a_group(
    look: Callable[..., Seen], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """A hybrid cut 3/1: the last stage has no layer that looks back over a window. What is stored
    there is loaded by a new process, with another number of blocks."""
    gemma = attention.gemma2(tmp_path_factory.mktemp("model") / "gemma")
    memory, batched, page = 64 << 20, 2048, BLOCK * 2 * 2 * 64 * 4
    options: dict[str, Any] = {
        "served": gemma,
        "dtype": "float32",
        "kv_cache_memory_bytes": memory,
        "max_num_batched_tokens": batched,
        "pool": tmp_path / "pool",
    }
    sizes = KvSizes(
        config.estimate(config.load(gemma)[0], "float32"),
        # Without asynchronous scheduling, as on CPU, as many batches are under way as ranks.
        Serving(block_size=BLOCK, max_length=4096, batched_tokens=batched, concurrent_batches=2),
    )
    assert [sizes.block_bytes(0, 3), sizes.block_bytes(3, 4)] == [2 * page, page]
    # Three full blocks of either group.
    uniform = look("3,1", stored=6, **options)
    assert uniform.tokens == sizes.tokens(memory // (2 * page))
    found = look("3,1", **options | proportional(2 * memory))
    assert found.tokens == sizes.tokens(2 * memory // (3 * page))
    assert found.answer.cached == 3 * BLOCK
    assert found.answer.tokens == uniform.answer.tokens
