"""Many requests at once, preempted ones, aborted ones: with steps that are scheduled one after the
other, and with steps that are scheduled while the one before still runs, as on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.async_on_cpu import ASYNCHRONOUS, RUNS_AHEAD
from lab.engines.node import ANSWER_TIMEOUT, Node
from lab.network import LIMIT, Way
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.servers import Server

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
    # Four fit, until each needs a block more for what it has generated.
    prompts = [tokens(3 * BLOCK - 4 * i, seed=30 + i) for i in range(6)]
    expected = [plain.ask(prompt, max_tokens=40).tokens for prompt in prompts]
    with serve(
        llama,
        pool=f"file://{tmp_path}/pool?size=1GiB",
        kv_cache_memory_bytes=12 * KV_BYTES_PER_BLOCK,
        max_model_len=1024,
    ) as node:
        for _ in range(2):
            running = [node.start(prompt, max_tokens=40) for prompt in prompts]
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

    def at_once(node: Node, way: Way, prompt: list[int]) -> int:
        way.hold()
        return node.start(prompt, max_tokens=100)

    def in_its_look_up(node: Node, way: Way, prompt: list[int]) -> int:
        way.hold()
        number = node.start(prompt, max_tokens=100)
        way.wait_held()
        return number

    def in_its_load(node: Node, way: Way, prompt: list[int]) -> int:
        way.hold(after=KV_BYTES_PER_BLOCK // 2)
        number = node.start(prompt, max_tokens=100)
        way.wait_held()
        return number

    def after_its_load(node: Node, way: Way, prompt: list[int]) -> int:
        loaded = node.counters().get("loaded_tokens", 0)
        number = node.start(prompt, max_tokens=100)
        node.wait_for("loaded_tokens", loaded + 6 * BLOCK, timeout=LIMIT)
        return number

    # Room for two such requests: blocks that an aborted one kept would soon be missed.
    with (
        Server("redis", tmp_path) as server,
        Way(server.port) as way,
        serve(
            llama,
            pool=f"redis://127.0.0.1:{way.port}",
            kv_cache_memory_bytes=16 * KV_BYTES_PER_BLOCK,
            max_model_len=1024,
            # Nothing is given up by itself.
            settings={
                "penstock.lookup_timeout": 2 * ANSWER_TIMEOUT,
                "penstock.load_timeout": 2 * ANSWER_TIMEOUT,
            },
        ) as node,
    ):
        for prompt in prompts:
            node.ask(prompt)
        node.wait_for("stored_blocks", 24, timeout=LIMIT)
        for begin in (at_once, in_its_look_up, in_its_load, after_its_load):
            for prompt in prompts:
                node.forget(timeout=LIMIT)
                number = begin(node, way, prompt)
                node.abort(number)
                node.answer(number)
                way.release()
        node.forget(timeout=LIMIT)
        for prompt in prompts:
            assert node.ask(prompt).tokens == plain.ask(prompt).tokens
