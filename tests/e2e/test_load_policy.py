"""Loading is weighed against recomputing, by what both of them take."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.node import Answer, Node
from tests.network import Way
from tests.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

BLOCKS = 12
STORED = [tokens(BLOCKS * BLOCK + 30, seed=800 + i) for i in range(24)]
_fresh = itertools.count(900)


def fresh(node: Node) -> Answer:
    """A prompt that nobody has stored."""
    return node.ask(tokens(BLOCKS * BLOCK + 30, seed=next(_fresh)), max_tokens=1)


def test_a_pool_that_is_too_slow_is_left_alone_until_it_is_not(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    with Server("redis", tmp_path) as server, Way(server.port) as way:
        with start(llama, pool=server.tcp_url) as first:
            expected = [first.ask(prompt, max_tokens=1).tokens for prompt in STORED]
            first.wait_for("stored_blocks", BLOCKS * len(STORED), timeout=120)
            computed = statistics.median(fresh(first).seconds for _ in range(5))
        # A load takes five seconds, and longer where computing takes long too.
        seconds = max(5.0, 12 * computed)
        way.be(delay=0.01, mbit=8 * BLOCKS * KV_BYTES_PER_BLOCK / 1e6 / seconds)
        with start(
            llama,
            pool=f"redis://127.0.0.1:{way.port}",
            settings={
                "penstock.host_tier": True,
                "penstock.load_policy": "auto",
                "penstock.load_timeout": 6 * seconds,
            },
        ) as second:
            for _ in range(3):
                fresh(second)
            hits = iter(zip(STORED, expected, strict=True))
            again = itertools.cycle(zip(STORED, expected, strict=True))

            def hit() -> Answer:
                prompt, answer = next(hits)
                got = second.ask(prompt, max_tokens=1)
                assert got.tokens == answer
                return got

            hit(), hit()
            pairs = [(hit().seconds, fresh(second).seconds) for _ in range(7)]
            counters = second.counters()
            assert counters["declined_tokens"] >= 6 * BLOCKS * BLOCK
            assert statistics.median(a / b for a, b in pairs) < 1.5
            # Nobody is told that the network is well again: it is found out.
            way.be()
            before = second.counters()["loaded_tokens"]
            deadline = time.monotonic() + 240
            while second.counters()["loaded_tokens"] < before + 3 * BLOCKS * BLOCK:
                assert time.monotonic() < deadline
                second.forget()
                prompt, answer = next(again)
                assert second.ask(prompt, max_tokens=1).tokens == answer
            assert second.counters()["probes"] > 0


def test_never_means_never(llama: Path, start: Callable[..., Node], tmp_path: Path) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    with start(llama, pool=pool, settings={"penstock.load_policy": "never"}) as node:
        node.ask(STORED[0])
        node.wait_for("stored_blocks", BLOCKS)
        node.forget()
        assert node.ask(STORED[0]).cached == 0
        counters = node.counters()
        assert counters["declined_tokens"] == BLOCKS * BLOCK
        assert counters.get("probes", 0) == 0


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
