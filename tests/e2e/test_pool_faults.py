"""A pool that is absent, dies, freezes, fills up or comes back: same tokens, nothing hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.node import ANSWER_TIMEOUT, SHORT_LIMITS, Answer, Node
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

            # Frozen in the middle of a load, which is not so every time.
            before = node.counters()
            for pause in (0.004, 0.008, 0.012, 0.016, 0.02):
                node.forget()
                number = node.start(PROMPTS[0])
                time.sleep(pause)
                server.freeze()
                try:
                    assert node.answer(number).tokens == expected[0].tokens
                finally:
                    server.thaw()
                wait_for_hits(node, expected)
            frozen = node.counters()
            caught = ("lookup_failures", "load_failed_blocks")
            assert sum(frozen.get(name, 0) - before.get(name, 0) for name in caught) > 0

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
        start(llama, pool=server.unix_url, settings=SHORT_LIMITS) as node,
    ):
        wait_for_hits(node, expected)
        before = node.counters()
        for attempt in range(20):
            node.forget()
            numbers = [node.start(prompt) for prompt in PROMPTS]
            # When the loads run depends on the machine: from early to late.
            killer = threading.Timer(0.005 + 0.003 * attempt, server.kill)
            killer.start()
            answers = [node.answer(number, ANSWER_TIMEOUT) for number in numbers]
            killer.join()
            assert [a.tokens for a in answers] == [a.tokens for a in expected]
            server.start()
            wait_for_hits(node, expected)
            if node.counters().get("load_failed_blocks", 0) > before.get("load_failed_blocks", 0):
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
