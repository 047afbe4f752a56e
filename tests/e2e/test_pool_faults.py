"""A pool that is absent, dies, freezes, fills up or comes back: same tokens, nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.node import ANSWER_TIMEOUT, SHORT_LIMITS, Answer, Node
from tests.network import Way
from tests.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

BLOCKS = 16
PROMPTS = [tokens(BLOCKS * BLOCK + 30, seed=70 + i) for i in range(3)]


@pytest.fixture(scope="module")
def expected(plain: Node) -> list[Answer]:
    """For each prompt vLLM's own prefix-cache hit."""
    for prompt in PROMPTS:
        plain.ask(prompt)
    return [plain.ask(prompt) for prompt in PROMPTS]


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Server:
    """A server that is not started yet."""
    return Server(request.param, tmp_path)


def ask_all(node: Node, expected: list[Answer]) -> list[Answer]:
    """Asks every prompt anew; all answers must be there in time and right."""
    node.forget()
    answers = [node.ask(prompt) for prompt in PROMPTS]
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    return answers


def wait_for_hits(node: Node, expected: list[Answer], timeout: float = 60.0) -> None:
    """Asks until everything comes from the pool again."""
    end = time.monotonic() + timeout
    while True:
        answers = ask_all(node, expected)
        if all(answer.cached == BLOCKS * BLOCK for answer in answers):
            return
        assert time.monotonic() < end, f"no hits again: {node.counters()}"
        time.sleep(0.2)


def test_every_fault_in_one_life(
    server: Server, llama: Path, expected: list[Answer], start: Callable[..., Node]
) -> None:
    # Absent at start: the engine comes up and serves without it.
    with start(llama, pool=server.unix_url, settings=SHORT_LIMITS) as node:
        assert all(answer.cached == 0 for answer in ask_all(node, expected))

        with server:
            # It appears: stores go there, and are hits after that.
            wait_for_hits(node, expected)

            # Frozen: look-ups and loads end by their deadlines.
            server.freeze()
            try:
                ask_all(node, expected)
            finally:
                server.thaw()
            wait_for_hits(node, expected)

            # Frozen in the middle of a load. How soon that is depends on the machine.
            before = node.counters()
            caught, attempts = 0.0, 0
            while not caught or attempts < 5:
                assert attempts < 25, "no look-up and no load was caught"
                node.forget()
                number = node.start(PROMPTS[0])
                time.sleep(0.004 * (1 + attempts % 5))
                server.freeze()
                try:
                    assert node.answer(number).tokens == expected[0].tokens
                finally:
                    server.thaw()
                wait_for_hits(node, expected)
                names = ("lookup_failures", "load_failed_blocks")
                frozen = node.counters()
                caught = sum(frozen.get(name, 0) - before.get(name, 0) for name in names)
                attempts += 1

            # Killed in the middle of loads, and started again, empty.
            for pause in (0.005, 0.01, 0.02):
                node.forget()
                numbers = [node.start(prompt) for prompt in PROMPTS]
                time.sleep(pause)
                server.kill()
                answers = [node.answer(number) for number in numbers]
                assert [a.tokens for a in answers] == [a.tokens for a in expected]
                ask_all(node, expected)
                server.start()
                wait_for_hits(node, expected)


def test_a_load_under_way_when_the_pool_dies(
    llama: Path, expected: list[Answer], start: Callable[..., Node], tmp_path: Path
) -> None:
    """Many loads run while the server is killed: some fail half-way, all answers are right."""
    with (
        Server("redis", tmp_path) as server,
        Way(server.port) as way,
        # Its limits are generous: what fails, fails as the server is killed.
        start(llama, pool=f"redis://127.0.0.1:{way.port}") as node,
    ):
        wait_for_hits(node, expected)
        before = node.counters()
        # All of it takes a second.
        way.be(mbit=8 * len(PROMPTS) * BLOCKS * KV_BYTES_PER_BLOCK / 1e6)
        for _ in range(5):
            node.forget()
            came_back = way.came_back
            numbers = [node.start(prompt) for prompt in PROMPTS]
            end = time.monotonic() + 30
            # Without a hit nothing comes.
            while way.came_back < came_back + KV_BYTES_PER_BLOCK and time.monotonic() < end:
                time.sleep(0.001)
            server.kill()
            answers = [node.answer(number, ANSWER_TIMEOUT) for number in numbers]
            assert [a.tokens for a in answers] == [a.tokens for a in expected]
            server.start()
            wait_for_hits(node, expected)
            after = node.counters()
            if after.get("load_failed_blocks", 0) > before.get("load_failed_blocks", 0):
                return
        pytest.fail("no load was caught half-way")


def test_a_full_pool(
    llama: Path, expected: list[Answer], start: Callable[..., Node], tmp_path: Path
) -> None:
    server = Server("redis", tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with server, start(llama, pool=server.unix_url, settings=SHORT_LIMITS) as node:
        for _ in range(3):
            ask_all(node, expected)
        node.wait_for("stores_failed", 1)
