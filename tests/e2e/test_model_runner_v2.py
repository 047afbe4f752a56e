"""vLLM's model runner V2, CUDA's default, with its Triton kernels interpreted on the CPU.

The order in which it calls a connector differs from V1's, which the other tests run: stores and
loads come after sampling, preempted requests are told of before the forward pass. Interpreted
kernels take their time, so models, blocks and answers are small here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e import models
from tests.e2e.conftest import tokens
from tests.e2e.node import Node

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1",
        reason="runs in an environment with Triton: scripts/model-runner-v2.sh",
    ),
]

BLOCK = 32
PAGE = 2 * 2 * 64 * 4 * BLOCK
"""A layer's part of a block: K and V, KV heads, head size, bytes of float32, tokens."""
PROMPT = tokens(4 * BLOCK + 5, seed=61)


@pytest.fixture(scope="module")
def serve(start: Callable[..., Node]) -> Callable[..., Node]:
    """Starts an engine and checks which runner it has."""

    def run(model: Path, **options: object) -> Node:
        node = start(model, **{"block_size": BLOCK, "max_model_len": 1024} | options)
        assert "Using V2 Model Runner" in node.log.read_text()
        return node

    return run


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("model") / "llama", layers=2)


@pytest.fixture(scope="module")
def alone(serve: Callable[..., Node], small: Path) -> Iterator[Node]:
    """vLLM alone, with the same runner."""
    with serve(small) as node:
        yield node


def test_another_process_loads_what_one_stored(
    serve: Callable[..., Node], small: Path, alone: Node, tmp_path: Path
) -> None:
    """Bit for bit what vLLM's own prefix cache gives, answers that were stored too included."""
    pool = f"file://{tmp_path}/pool?size=256MiB"
    with serve(small, pool=pool) as first:
        said = first.ask(PROMPT, max_tokens=2 * BLOCK).tokens
        first.wait_for("stored_blocks", 6)
    turn = [*PROMPT, *said, 9, 10, 11]
    with serve(small, pool=pool) as second:
        for prompt in (PROMPT, turn):
            reachable = (len(prompt) - 1) // BLOCK * BLOCK
            if prompt is turn:
                assert alone.ask(PROMPT, max_tokens=2 * BLOCK).tokens == said
            cold, own_hit, loaded = alone.ask(prompt), alone.ask(prompt), second.ask(prompt)
            assert loaded.cached == own_hit.cached == reachable
            assert loaded.text == own_hit.text
            assert loaded.tokens == cold.tokens
        assert second.counters().get("load_failed_blocks", 0) == 0


def test_damaged_blocks_are_computed_again(
    serve: Callable[..., Node], small: Path, alone: Node, tmp_path: Path
) -> None:
    """Half of the values are damaged: what follows the first of them is computed."""
    expected = alone.ask(PROMPT)
    with serve(small, pool=f"file://{tmp_path}/pool?size=256MiB") as node:
        node.ask(PROMPT)
        node.wait_for("stored_blocks", 4)
        values = [p for p in (tmp_path / "pool").rglob("*") if p.is_file()]
        values = sorted(p for p in values if p.stat().st_size > 2 * PAGE)
        assert len(values) == 4
        for path in values[::2]:
            content = bytearray(path.read_bytes())
            content[-1] ^= 0x40
            path.write_bytes(content)
        node.forget()
        assert node.ask(PROMPT).tokens == expected.tokens
        counters = node.counters()
        assert counters["rejected_objects"] >= 1
        assert counters["load_failed_blocks"] >= 1


def test_preempted_requests(
    serve: Callable[..., Node], small: Path, alone: Node, tmp_path: Path
) -> None:
    prompts = [tokens(3 * BLOCK + 7 * i, seed=70 + i) for i in range(4)]
    expected = [alone.ask(prompt, max_tokens=BLOCK + 10).tokens for prompt in prompts]
    with serve(
        small,
        pool=f"file://{tmp_path}/pool?size=256MiB",
        kv_cache_memory_bytes=10 * 2 * PAGE,
        max_model_len=8 * BLOCK,
    ) as node:
        running = [node.start(prompt, max_tokens=BLOCK + 10) for prompt in prompts]
        assert [node.answer(number).tokens for number in running] == expected
        counters = node.counters()
        assert counters["num_preemptions"] > 0
        assert counters["stored_blocks"] > 0


def test_a_hybrid_model(serve: Callable[..., Node], tmp_path: Path) -> None:
    """Full attention and sliding windows: two groups of blocks."""
    model = models.gemma2(tmp_path / "gemma", window=2 * BLOCK)
    pool = f"file://{tmp_path}/pool?size=256MiB"
    with serve(model) as plain, serve(model, pool=pool) as node:
        cold, own_hit = plain.ask(PROMPT), plain.ask(PROMPT)
        assert node.ask(PROMPT).tokens == cold.tokens
        node.wait_for("stored_blocks", 8)
        node.forget()
        loaded = node.ask(PROMPT)
        assert loaded.cached == own_hit.cached == 4 * BLOCK
        assert loaded.text == own_hit.text
        assert node.counters()["loaded_tokens"] == 4 * BLOCK
