"""vLLM's model runner V2, CUDA's default, with its Triton kernels interpreted on the CPU.

The order in which it calls a connector differs from V1's, which the other tests run: stores and
loads come after sampling, preempted requests are told of before the forward pass. Interpreted
kernels take their time, so models, blocks and answers are small here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from lab.engines.async_on_cpu import ASYNCHRONOUS, RUNS_AHEAD
from lab.engines.node import Node
from lab.models import attention
from lab.models.hybrids import HYBRIDS
from lab.network import Way
from lab.waiting import eventually
from tests.e2e.conftest import tokens
from tests.servers import Server

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1",
        reason="runs in an environment with Triton: scripts/model-runner-v2.sh",
    ),
]

BLOCK = 32
PAGE = 2 * 2 * 32 * 4 * BLOCK
"""A layer's part of a block: K and V, KV heads, head size, bytes of float32, tokens."""
PROMPT = tokens(4 * BLOCK + 5, seed=61)


@pytest.fixture(scope="module")
def serve(start: Callable[..., Node]) -> Callable[..., Node]:
    """Starts an engine and checks which runner it has."""

    def run(model: Path, **options: object) -> Node:
        common = {"block_size": BLOCK, "max_model_len": 1024, **ASYNCHRONOUS}
        node = start(model, **common | options)
        said = node.log.read_text()
        assert "Using V2 Model Runner" in said
        assert RUNS_AHEAD in said
        return node

    return run


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return attention.llama(tmp_path_factory.mktemp("model") / "llama", layers=2)


@pytest.fixture(scope="module")
def alone(serve: Callable[..., Node], small: Path) -> Iterator[Node]:
    """vLLM alone, with the same runner."""
    with serve(small) as node:
        yield node


def start_together(node: Node, prompts: Sequence[list[int]], max_tokens: int) -> list[int]:
    """Starts requests that begin together, however long the machine takes to send them: the engine
    stands still until all of them were sent."""
    # With its first request a node asks the engine for something else, too.
    node.ask([7, 8, 9], max_tokens=2)
    engine = psutil.Process(node.process.pid).children(recursive=True)
    assert engine
    for process in engine:
        process.suspend()
    try:
        numbers = [node.start(prompt, max_tokens=max_tokens) for prompt in prompts]
        eventually(lambda: node.counters()["unfinished_requests"] == len(prompts), node.counters)
    finally:
        for process in engine:
            process.resume()
    return numbers


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
        running = start_together(node, prompts, max_tokens=BLOCK + 10)
        assert [node.answer(number).tokens for number in running] == expected
        assert node.counters()["num_preemptions"] > 0
        node.wait_for("stored_blocks", 1)


def test_a_hybrid_model(serve: Callable[..., Node], tmp_path: Path) -> None:
    """Full attention and sliding windows: two groups of blocks."""
    model = attention.gemma2(tmp_path / "gemma", window=2 * BLOCK)
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


LFM2 = HYBRIDS["lfm2"]


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LFM2.saved(tmp_path_factory.mktemp("lfm2"))


@pytest.fixture(scope="module")
def lfm2_alone(serve: Callable[..., Node], lfm2: Path) -> Iterator[Node]:
    """vLLM alone. It keeps the states at the ends of all blocks, not only of prompts."""
    with serve(lfm2, prefix_cache_retention_interval=None, **LFM2.options) as node:
        yield node


def test_layers_that_keep_a_state(
    serve: Callable[..., Node], lfm2: Path, lfm2_alone: Node, tmp_path: Path
) -> None:
    """Another process goes on from a prompt's last state, and from one that an answer has left."""
    pool = f"file://{tmp_path}/pool?size=256MiB"
    with serve(lfm2, pool=pool, **LFM2.options) as first:
        said = first.ask(PROMPT, max_tokens=2 * BLOCK).tokens
        # Attention's blocks, and three states of each of two groups.
        first.wait_for("stored_blocks", 6 + 2 * 3)
    turn = [*PROMPT, *said, 9, 10, 11]
    with serve(lfm2, pool=pool, **LFM2.options) as second:
        for prompt in (PROMPT, turn):
            lfm2_alone.forget()
            assert lfm2_alone.ask(PROMPT, max_tokens=2 * BLOCK).tokens == said
            own_hit, loaded = lfm2_alone.ask(prompt), second.ask(prompt)
            assert loaded.cached == own_hit.cached == (len(prompt) - 1) // BLOCK * BLOCK
            assert loaded.text == own_hit.text
        counters = second.counters()
        assert counters["loaded_tokens"] == 4 * BLOCK + 2 * BLOCK
        assert counters.get("load_failed_blocks", 0) == 0


def test_blocks_that_are_zeroed_in_other_hands_are_read_before(
    serve: Callable[..., Node], lfm2: Path, lfm2_alone: Node, tmp_path: Path
) -> None:
    """Two requests fill a block in the same step, and take all room there is. In the next step the
    first needs the second one's blocks, which are still to be read: the pool is slow, and there are
    fewer slots than objects. As one of the two may begin a step or two later, it has more tokens.
    The prompts fill no block, so nobody waits for the slow pool before they begin.
    """
    rounds = [
        (tokens(BLOCK - 16, seed=10 * late), tokens(BLOCK - 16 + late, seed=10 * late + 1))
        for late in range(4)
    ]
    block_bytes = LFM2.block_bytes * BLOCK // LFM2.block
    with (
        Server("valkey", tmp_path) as server,
        Way(server.port) as way,
        serve(
            lfm2,
            pool=f"valkey://127.0.0.1:{way.port}",
            settings={"penstock.host_bytes": 4 * block_bytes},
            # A block of attention and two states for each request, and one that stands for none.
            kv_cache_memory_bytes=7 * block_bytes,
            max_model_len=2 * BLOCK,
            **LFM2.options,
        ) as node,
    ):
        turns = []
        way.be(delay=0.01)
        for prompts in rounds:
            running = start_together(node, prompts, max_tokens=24)
            for prompt, number in zip(prompts, running, strict=True):
                turns.append([*prompt, *node.answer(number).tokens])
            node.forget()
        counters = node.counters()
        assert counters["num_preemptions"] >= len(rounds)
        way.be()
        loaded = 0
        for turn in turns:
            cold, again = lfm2_alone.ask(turn, max_tokens=2), node.ask(turn, max_tokens=2)
            loaded += again.cached
            assert again.tokens == cold.tokens
            # Computed beside another, so it may be rounded differently. With a block that belonged
            # to another request meanwhile, nothing would be near.
            assert abs(again.logprobs[0] - cold.logprobs[0]) < 0.01
        assert loaded >= len(rounds) * BLOCK
