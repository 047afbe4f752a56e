"""Resets that preempt running requests, while Penstock moves blocks: each says True, and no answer
differs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.async_on_cpu import ASYNCHRONOUS, RUNS_AHEAD
from lab.engines.node import ANSWER_TIMEOUT, Node
from lab.network import Way
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.stored import all_stored
from tests.servers import Server

pytestmark = pytest.mark.e2e

NEVER: dict[str, Any] = {
    "penstock.lookup_timeout": 2 * ANSWER_TIMEOUT,
    "penstock.load_timeout": 2 * ANSWER_TIMEOUT,
}
"""Settings with which nothing is given up by itself."""


@pytest.fixture(params=["in turn", "ahead", pytest.param("two ranks", marks=pytest.mark.full)])
def serve(request: pytest.FixtureRequest, start: Callable[..., Node]) -> Callable[..., Node]:
    """Starts an engine: with asynchronous scheduling, or without, or of two ranks."""
    options: dict[str, Any] = {
        "in turn": {},
        "ahead": ASYNCHRONOUS,
        "two ranks": {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}},
    }[request.param]

    def served(model: Path, **more: Any) -> Node:
        node = start(model, **options | more)
        assert (RUNS_AHEAD in node.log.read_text()) == (request.param == "ahead")
        return node

    return served


def test_a_load_on_its_way_is_given_up(
    llama: Path, plain: Node, serve: Callable[..., Node], tmp_path: Path
) -> None:
    prompt, other = tokens(6 * BLOCK + 10, seed=50), tokens(2 * BLOCK, seed=51)
    with (
        Server("redis", tmp_path) as server,
        Way(server.port) as way,
        serve(llama, pool=f"redis://127.0.0.1:{way.port}", settings=NEVER) as node,
    ):
        before = node.counters()
        node.ask(prompt)
        all_stored(node, 6, since=before)
        node.forget()
        way.hold(after=KV_BYTES_PER_BLOCK // 2)
        running, loading = node.start(other, max_tokens=200), node.start(prompt)
        way.wait_held()
        assert node.reset(running=True)
        # Nothing of the load is told to have failed: the request may load again.
        assert node.counters().get("load_failed_blocks", 0) == 0
        way.release()
        assert node.answer(loading).tokens == plain.ask(prompt).tokens
        assert node.answer(running).tokens == plain.ask(other, max_tokens=200).tokens
        assert node.reset(running=True)
        answer = node.ask(prompt)
        assert (answer.cached, answer.tokens) == (6 * BLOCK, plain.ask(prompt).tokens)


def test_a_store_on_its_way_is_no_hindrance(
    llama: Path, serve: Callable[..., Node], tmp_path: Path
) -> None:
    with serve(llama, pool=f"file://{tmp_path}/pool?size=1GiB") as node:
        for seed in range(8):
            node.ask(tokens(4 * BLOCK, seed=seed), max_tokens=1)
            assert node.reset(running=True)


def test_resets_under_load(
    llama: Path, plain: Node, serve: Callable[..., Node], start: Callable[..., Node], tmp_path: Path
) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    draws = random.Random(4)
    prompts = [tokens(4 * BLOCK + 20 * number + 3, seed=60 + number) for number in range(5)]
    expected = [plain.ask(prompt, max_tokens=24).tokens for prompt in prompts]
    with serve(llama, pool=pool) as node:
        for _ in range(12):
            asked = [node.start(prompt, max_tokens=24) for prompt in prompts]
            for prompt in draws.sample(prompts, draws.randrange(1, 4)):
                # Somewhere in the others' work.
                node.ask(prompt, max_tokens=draws.randrange(1, 8))
                assert node.reset(running=True, pool=draws.random() < 0.5)
            answers = [node.answer(number) for number in asked]
            assert [answer.tokens for answer in answers] == expected
            assert all(0 <= answer.cached <= 5 * BLOCK for answer in answers)
        assert node.counters()["loaded_tokens"] > 0
    with start(llama, pool=pool) as second:
        assert [second.ask(prompt, max_tokens=24).tokens for prompt in prompts] == expected
