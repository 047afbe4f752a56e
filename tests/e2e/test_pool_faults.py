"""A pool that is absent, dies, freezes, fills up or comes back: same tokens, nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engines.node import ANSWER_TIMEOUT, SHORT_LIMITS, Answer, Node
from lab.network import LIMIT, Way
from lab.waiting import eventually
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.servers import Server

pytestmark = pytest.mark.e2e

BLOCKS = 16
PROMPTS = [tokens(BLOCKS * BLOCK + 30, seed=70 + i) for i in range(3)]


def own_hits(plain: Node) -> list[Answer]:
    """For each prompt vLLM's own prefix-cache hit."""
    for prompt in PROMPTS:
        plain.ask(prompt)
    return [plain.ask(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(plain: Node) -> list[Answer]:
    return own_hits(plain)


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Server:
    """A server that is not started yet."""
    return Server(request.param, tmp_path)


def ask_all(node: Node, expected: list[Answer]) -> list[Answer]:
    """Asks every prompt anew; all answers must be there in time and right."""
    node.forget()
    answers = [node.ask(prompt) for prompt in PROMPTS]
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    return answers


def wait_for_hits(node: Node, expected: list[Answer], timeout: float = LIMIT) -> None:
    """Asks until everything comes from the pool again."""

    def are_hits() -> bool:
        return all(answer.cached == BLOCKS * BLOCK for answer in ask_all(node, expected))

    eventually(are_hits, node.counters, seconds=timeout, pause=0.2)


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

            # Killed while it is asked, and started again, empty.
            node.forget()
            numbers = [node.start(prompt) for prompt in PROMPTS]
            server.kill()
            answers = [node.answer(number) for number in numbers]
            assert [a.tokens for a in answers] == [a.tokens for a in expected]
            ask_all(node, expected)
            server.start()
            wait_for_hits(node, expected)


@pytest.mark.parametrize(
    ("after", "counter"),
    [(0, "lookup_failures"), (KV_BYTES_PER_BLOCK // 2, "load_failed_blocks")],
    ids=["look-up", "load"],
)
def test_under_way_when_the_pool_freezes(
    after: int,
    counter: str,
    llama: Path,
    expected: list[Answer],
    start: Callable[..., Node],
    tmp_path: Path,
) -> None:
    """The server has been asked, and goes silent before its answer, or in the middle of a value."""
    with (
        Server("redis", tmp_path) as server,
        Way(server.port) as way,
        start(llama, pool=f"redis://127.0.0.1:{way.port}", settings=SHORT_LIMITS) as node,
    ):
        wait_for_hits(node, expected)
        before = node.counters().get(counter, 0)
        way.hold(after)

        def is_given_up() -> bool:
            assert [answer.cached for answer in ask_all(node, expected)] == [0] * len(PROMPTS)
            return node.counters().get(counter, 0) > before

        # In most cases once. A look-up that is late by itself is followed by no load.
        eventually(is_given_up, node.counters, seconds=LIMIT)
        way.wait_held()
        way.release()
        wait_for_hits(node, expected)


def test_a_load_under_way_when_the_pool_dies(
    llama: Path, expected: list[Answer], start: Callable[..., Node], tmp_path: Path
) -> None:
    """The server is killed in the middle of values: loads fail half-way, all answers are right."""
    with (
        Server("redis", tmp_path) as server,
        Way(server.port) as way,
        # Longer than an answer is waited for: what fails, fails as the server is killed.
        start(
            llama,
            pool=f"redis://127.0.0.1:{way.port}",
            settings={
                "penstock.lookup_timeout": 2 * ANSWER_TIMEOUT,
                "penstock.load_timeout": 2 * ANSWER_TIMEOUT,
            },
        ) as node,
    ):
        wait_for_hits(node, expected)
        before = node.counters().get("load_failed_blocks", 0)
        node.forget()
        way.hold(after=KV_BYTES_PER_BLOCK // 2)
        numbers = [node.start(prompt) for prompt in PROMPTS]
        way.wait_held()
        server.kill()
        way.release(is_lost=True)
        answers = [node.answer(number, ANSWER_TIMEOUT) for number in numbers]
        assert [a.tokens for a in answers] == [a.tokens for a in expected]
        node.wait_for("load_failed_blocks", before + 1, timeout=LIMIT)
        server.start()
        wait_for_hits(node, expected)


def test_a_full_pool(
    llama: Path, expected: list[Answer], start: Callable[..., Node], tmp_path: Path
) -> None:
    server = Server("redis", tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with server, start(llama, pool=server.unix_url, settings=SHORT_LIMITS) as node:
        for _ in range(3):
            ask_all(node, expected)
        node.wait_for("stores_failed", 1, timeout=LIMIT)
