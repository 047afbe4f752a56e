"""A pool behind a slow, lossy or cut network: same tokens, nothing waits beyond its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.node import SHORT_LIMITS, Node
from tests.e2e.test_pool_faults import BLOCK, BLOCKS, PROMPTS, ask_all, wait_for_hits
from tests.network import Way
from tests.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


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

        # The 16 MiB of a prompt take longer than a load may, 10 Mbit/s a connection: what comes in
        # time is used, the rest is given up and computed.
        before = node.counters()
        way.be(delay=0.005, mbit=10)
        ask_all(node, expected)
        slow = node.counters()
        loaded = slow["loaded_tokens"] - before["loaded_tokens"]
        failed = slow["load_failed_blocks"] - before.get("load_failed_blocks", 0)
        assert loaded > 0
        assert failed > 0
        assert loaded + failed * BLOCK <= BLOCKS * BLOCK * len(PROMPTS)
        way.be()
        wait_for_hits(node, expected)

        # The cable is cut in the middle of loads. Nobody is told, and the first requests find that
        # out by their deadlines; after them the pool is left alone.
        node.forget()
        numbers = [node.start(prompt) for prompt in PROMPTS]
        time.sleep(0.01)
        way.cut()
        answers = [node.answer(number) for number in numbers]
        assert [a.tokens for a in answers] == [a.tokens for a in expected]
        for _ in range(3):
            assert [answer.cached for answer in ask_all(node, expected)] == [0] * len(PROMPTS)
        began = time.monotonic()
        ask_all(node, expected)
        left_alone = time.monotonic() - began
        assert node.counters()["lookup_failures"] > 0
        way.mend()
        wait_for_hits(node, expected)

        # As long as without a pool, more or less: the machine is not the same from one to the next.
        node.forget()
        computed = sum(plain.ask([*prompt[::-1]]).seconds for prompt in PROMPTS)
        assert left_alone < 3 * computed + 2
