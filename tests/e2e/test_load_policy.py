"""Loading is weighed against recomputing, by what both of them take."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Answer, Node
from lab.network import LIMIT, Way
from lab.waiting import eventually
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.servers import Server

pytestmark = pytest.mark.e2e

BLOCKS = 12
STORED = [tokens(BLOCKS * BLOCK + 30, seed=800 + i) for i in range(24)]

SHORT_REPLIES = 4096
"""Bytes: what a connection says to many look-ups and stores, and a small part of a value."""
LEFT_ALONE = 4
"""Prompts that could be loaded, from a pool that is not worth it."""
SECONDS_PER_TOKEN = 0.001
"""Of an engine that computes slowly."""


def compute_slowly() -> None:
    """Has a step take so long that loading from a pool that answers is sooner, on any machine.
    Called in a test's engine before it starts; the engine's other processes are forked from it."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    execute_model = GPUModelRunner.execute_model

    @functools.wraps(execute_model)
    def wrapped(self: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        time.sleep(SECONDS_PER_TOKEN * scheduler_output.total_num_scheduled_tokens)
        return execute_model(self, scheduler_output, *args, **options)

    GPUModelRunner.execute_model = wrapped


def settled(node: Node) -> dict[str, float]:
    """The node's counters. An idle engine reports with its next step."""
    node.ask([7, 8, 9], max_tokens=2)
    return node.counters()


def left_alone(counters: dict[str, float], before: dict[str, float]) -> float:
    """How often the one request since then was left alone: 1 if its load was declined, and 1 if it
    did not wait to hear what could be loaded. One that ends before it hears is not declined."""
    since = {name: count - before.get(name, 0) for name, count in counters.items()}
    return since["declined_tokens"] / (BLOCKS * BLOCK) + since["lookups_not_awaited"]


def from_pool(counters: dict[str, float]) -> float:
    """Bytes that loads got, and not from host memory."""
    return counters.get("loaded_bytes", 0) - counters.get("kept_bytes", 0)


def test_a_pool_that_is_too_slow_is_left_alone_until_it_is_not(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    """What it is worth on a network, in seconds, `benches.load_policy` measures."""
    with Server("redis", tmp_path) as server, Way(server.port) as way:
        with start(llama, pool=server.tcp_url) as first:
            expected = [first.ask(prompt, max_tokens=1).tokens for prompt in STORED]
            first.wait_for("stored_blocks", BLOCKS * len(STORED), timeout=LIMIT)
        with start(
            llama,
            pool=f"redis://127.0.0.1:{way.port}",
            prepare="tests.e2e.test_load_policy:compute_slowly",
            settings={
                "penstock.host_tier": True,
                "penstock.load_policy": "auto",
                # Longer than an answer is waited for: nothing ends by its time limit.
                "penstock.lookup_timeout": 600.0,
                "penstock.load_timeout": 600.0,
            },
        ) as second:
            # Nobody has stored these: the engine learns what computing takes.
            for number in range(3):
                second.ask(tokens(BLOCKS * BLOCK + 30, seed=900 + number), max_tokens=1)
            hits = itertools.cycle(zip(STORED, expected, strict=True))

            def hit() -> Answer:
                prompt, answer = next(hits)
                got = second.ask(prompt, max_tokens=1)
                assert got.tokens == answer
                return got

            def is_given_up() -> bool:
                hit()
                return settled(second).get("load_failed_blocks", 0) > 0

            def told(last: dict[str, float]) -> dict[str, float] | None:
                now = settled(second)
                return now if left_alone(now, last) else None

            def is_loaded() -> bool:
                second.forget()
                hit()
                return from_pool(second.counters()) >= 3 * BLOCKS * KV_BYTES_PER_BLOCK

            # Look-ups are answered, and no value ever comes: slower than any computing. A load is
            # tried, and given up long before its time limit.
            way.hold(after=SHORT_REPLIES)
            eventually(is_given_up, second.counters, seconds=LIMIT)
            way.wait_held()
            # From then on the pool is left alone: nobody waits for it again.
            before = after = settled(second)
            for _ in range(LEFT_ALONE):
                last = after
                assert hit().cached == 0
                now = eventually(functools.partial(told, last), second.counters, seconds=LIMIT)
                assert now is not None
                after = now
                assert left_alone(after, last) in (1, 2)
            assert after["loads"] == before["loads"]
            assert from_pool(after) == 0
            # Nobody is told that the network is well again: it is found out.
            way.release()
            eventually(is_loaded, second.counters, seconds=LIMIT)
            assert second.counters()["probes"] > 0


def test_never_means_never(llama: Path, start: Callable[..., Node], tmp_path: Path) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    with start(llama, pool=pool, settings={"penstock.load_policy": "never"}) as node:
        node.ask(STORED[0])
        node.wait_for("stored_blocks", BLOCKS)
        node.forget()
        # It waits for no look-up, so it has to live until it hears what it could have loaded.
        number = node.start(STORED[0], max_tokens=2000)
        node.wait_for("declined_tokens", BLOCKS * BLOCK, timeout=LIMIT)
        node.abort(number)
        assert node.answer(number).cached == 0
        counters = node.counters()
        assert counters["declined_tokens"] == BLOCKS * BLOCK
        assert counters.get("loads", 0) == counters.get("probes", 0) == 0


def test_a_request_may_say_for_itself(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    def ask(node: Node, policy: str) -> int:
        node.forget()
        params = {"penstock.load_policy": policy}
        return node.ask(STORED[0], extra_args={"kv_transfer_params": params}).cached

    pool = f"file://{tmp_path}/pool?size=1GiB"
    with start(llama, pool=pool, settings={"penstock.load_policy": "never"}) as node:
        node.ask(STORED[0])
        node.wait_for("stored_blocks", BLOCKS)
        assert ask(node, "always") == BLOCKS * BLOCK
        assert ask(node, "never") == 0
        assert ask(node, "often") == 0
        assert "load_policy is 'often'" in node.log.read_text()
