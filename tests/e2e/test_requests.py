"""Many requests at once, preempted ones, aborted ones: with steps that are scheduled one after the
other, and with steps that are scheduled while the one before still runs, as on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.async_on_cpu import ASYNCHRONOUS, RUNS_AHEAD
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.node import Node

pytestmark = pytest.mark.e2e


@pytest.fixture(params=["in turn", "ahead"])
def serve(request: pytest.FixtureRequest, start: Callable[..., Node]) -> Callable[..., Node]:
    """Starts an engine, with asynchronous scheduling or without."""
    if request.param == "in turn":
        return start

    def ahead(model: Path, **options: Any) -> Node:
        node = start(model, **ASYNCHRONOUS | options)
        assert RUNS_AHEAD in node.log.read_text()
        return node

    return ahead


def test_concurrent_requests_with_shared_prefixes(
    llama: Path, plain: Node, serve: Callable[..., Node], tmp_path: Path
) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    shared = tokens(6 * BLOCK, seed=1)
    prompts = [shared + tokens(100 + 40 * i, seed=10 + i) for i in range(8)]
    expected = [plain.ask(prompt, max_tokens=16).tokens for prompt in prompts]
    with serve(llama, pool=pool) as first:
        running = [first.start(prompt, max_tokens=16) for prompt in prompts]
        assert [first.answer(number).tokens for number in running] == expected
        first.wait_for("stored_blocks", 6)
    with serve(llama, pool=pool) as second:
        running = [second.start(prompt, max_tokens=16) for prompt in prompts]
        answers = [second.answer(number) for number in running]
        assert [answer.tokens for answer in answers] == expected
        assert all(answer.cached >= 6 * BLOCK for answer in answers)
        assert second.counters().get("load_failed_blocks", 0) == 0


def test_preemption_under_a_tiny_kv_cache(
    llama: Path, plain: Node, serve: Callable[..., Node], tmp_path: Path
) -> None:
    prompts = [tokens(3 * BLOCK + 20 * i, seed=30 + i) for i in range(6)]
    expected = [plain.ask(prompt, max_tokens=BLOCK + 10).tokens for prompt in prompts]
    with serve(
        llama,
        pool=f"file://{tmp_path}/pool?size=1GiB",
        kv_cache_memory_bytes=12 * KV_BYTES_PER_BLOCK,
        max_model_len=1024,
    ) as node:
        for _ in range(2):
            running = [node.start(prompt, max_tokens=BLOCK + 10) for prompt in prompts]
            assert [node.answer(number).tokens for number in running] == expected
        counters = node.counters()
        assert counters["num_preemptions"] > 0
        assert counters["loaded_tokens"] > 0


def test_blocks_of_finished_requests_come_back(
    llama: Path, serve: Callable[..., Node], tmp_path: Path
) -> None:
    # Room for three such requests. Each is followed by steps that compute nothing, which is when
    # the stores of the last ones end.
    with serve(
        llama,
        pool=f"file://{tmp_path}/pool?size=1GiB",
        kv_cache_memory_bytes=16 * KV_BYTES_PER_BLOCK,
        max_model_len=1024,
    ) as node:
        for number in range(12):
            prompt = tokens(5 * BLOCK - 2, seed=400 + number)
            node.answer(node.start(prompt, max_tokens=8), timeout=60)


def test_aborted_requests_leave_nothing_behind(
    llama: Path, plain: Node, serve: Callable[..., Node], tmp_path: Path
) -> None:
    prompts = [tokens(6 * BLOCK + 10, seed=50 + i) for i in range(4)]
    # Room for two such requests: blocks that an aborted one kept would soon be missed.
    with serve(
        llama,
        pool=f"file://{tmp_path}/pool?size=1GiB",
        kv_cache_memory_bytes=16 * KV_BYTES_PER_BLOCK,
        max_model_len=1024,
    ) as node:
        for prompt in prompts:
            node.ask(prompt)
        node.wait_for("stored_blocks", 24)
        for pause in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05):
            for prompt in prompts:
                node.forget()
                number = node.start(prompt, max_tokens=100)
                time.sleep(pause)
                node.abort(number)
                node.answer(number)
        node.forget()
        for prompt in prompts:
            assert node.ask(prompt).tokens == plain.ask(prompt).tokens
