"""A pool behind a slow, lossy or cut network: same tokens, nothing waits beyond its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engines.node import SHORT_LIMITS, Node
from lab.network import LIMIT, Way
from lab.waiting import eventually
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.stored import all_stored
from tests.e2e.test_pool_faults import BLOCKS, PROMPTS, ask_all, wait_for_hits
from tests.servers import Server

pytestmark = pytest.mark.e2e


AT_ONCE = (1 << 20) // KV_BYTES_PER_BLOCK
"""Values that an engine asks for at once, at most: a MiB of them."""

ASKED = 80
"""Requests to a pool that does not answer."""


def most_tries(seconds: float) -> float:
    """How often a pool that does not answer may be tried in so many seconds. The slower the
    machine, the more may be: so this holds in every schedule.

    Both halves of the connector try it, each for itself: three times until they give it up, then
    after pauses of 0.5, 1, 2, 4 and 5 seconds, then every 5 seconds. Without any pauses each of the
    requests would try, and wait for a second.
    """
    return 2 * (3 + 5 + seconds / 5)


def test_every_network_in_one_life(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    for prompt in PROMPTS:
        plain.ask(prompt)
    expected = [plain.ask(prompt) for prompt in PROMPTS]
    with (
        Server("redis", tmp_path) as server,
        Way(server.port) as way,
        start(llama, pool=f"redis://127.0.0.1:{way.port}", settings=SHORT_LIMITS) as node,
    ):
        wait_for_hits(node, expected)

        # Far away, and with losses: everything is found and comes in time.
        for far in ({"delay": 0.005}, {"delay": 0.05}, {"delay": 0.005, "loss": 0.01}):
            way.be(**far)
            wait_for_hits(node, expected)

        # The blocks of a prompt take longer than a load may, 2 Mbit/s a connection. However much
        # comes in time, the answers are right.
        way.be(delay=0.005, mbit=2)
        ask_all(node, expected)
        way.be()
        wait_for_hits(node, expected)

        # Each connection brings the values that are asked for at once, and half of the next: what
        # comes in time is used, the rest is given up and computed.
        before, rounds, loaded, failed = node.counters(), 0, 0.0, 0.0
        way.hold(after=AT_ONCE * KV_BYTES_PER_BLOCK + KV_BYTES_PER_BLOCK // 2)

        def are_some_of_both() -> bool:
            nonlocal rounds, loaded, failed
            ask_all(node, expected)
            rounds += 1
            slow = node.counters()
            loaded = slow["loaded_tokens"] - before["loaded_tokens"]
            failed = slow.get("load_failed_blocks", 0) - before.get("load_failed_blocks", 0)
            return bool(loaded and failed)

        eventually(are_some_of_both, lambda: (loaded, failed), seconds=LIMIT)
        assert loaded + failed * BLOCK <= rounds * BLOCKS * BLOCK * len(PROMPTS)
        way.release()
        wait_for_hits(node, expected)

        # The cable is cut in the middle of loads. Nobody is told, and the first requests find that
        # out by their deadlines.
        node.forget()
        way.hold(after=KV_BYTES_PER_BLOCK // 2)
        numbers = [node.start(prompt) for prompt in PROMPTS]
        way.wait_held()
        way.cut()
        way.release()
        answers = [node.answer(number) for number in numbers]
        assert [a.tokens for a in answers] == [a.tokens for a in expected]
        for _ in range(3):
            assert [answer.cached for answer in ask_all(node, expected)] == [0] * len(PROMPTS)
        assert node.counters()["lookup_failures"] > 0

        # After them the pool is left alone: few of many requests try it, each over a connection of
        # its own, as one that did not answer is not used again.
        began, opened = time.monotonic(), way.opened
        for number in range(ASKED):
            node.ask(tokens(BLOCK + 10, seed=5000 + number), max_tokens=1)
        assert way.opened - opened <= most_tries(time.monotonic() - began)
        way.mend()
        wait_for_hits(node, expected)


def test_a_pool_far_away_is_loaded_from(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    # Two round trips, for a connection and a look-up, take twice as long as the first limit.
    defaults = {"penstock.lookup_timeout": None, "penstock.load_timeout": None}
    prompts = [tokens(2 * BLOCK + 10, seed=90 + number) for number in range(6)]
    expected = [plain.ask(prompt).tokens for prompt in prompts]
    with Server("redis", tmp_path) as server, Way(server.port) as way:
        pool = f"redis://127.0.0.1:{way.port}"
        with start(llama, pool=pool) as node:
            for prompt in prompts:
                node.ask(prompt)
            all_stored(node, 2 * len(prompts))
        way.be(delay=0.12)
        with start(llama, pool=pool, settings=defaults) as node:

            def are_hits() -> bool:
                node.forget()
                answers = [node.ask(prompt) for prompt in prompts]
                assert [answer.tokens for answer in answers] == expected
                return all(answer.cached == 2 * BLOCK for answer in answers)

            eventually(are_hits, node.counters, seconds=LIMIT)
            assert node.counters()["lookup_limit_raises"] > 0
            assert node.log.read_text().count("so look-ups may take") == 1
