"""A cluster of six servers whose slots move, and whose nodes freeze and die, during loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab.engines.node import SHORT_LIMITS, Answer, Node
from lab.waiting import eventually
from tests.cluster import Cluster
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.test_pool_faults import BLOCKS, PROMPTS, ask_all, own_hits, wait_for_hits

pytestmark = pytest.mark.e2e


pytestmark = pytest.mark.e2e

LONG_LIMITS = {"penstock.lookup_timeout": 60.0, "penstock.load_timeout": 120.0}
"""Where nothing is broken, nothing may be given up, however slow the machine is."""


@pytest.fixture(scope="module")
def expected(plain: Node) -> list[Answer]:
    return own_hits(plain)


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(request.param, tmp_path) as cluster:
        yield cluster


def test_while_slots_move_nothing_is_even_a_miss(
    cluster: Cluster, llama: Path, expected: list[Answer], start: Callable[..., Node]
) -> None:
    with start(llama, pool=cluster.url, settings=LONG_LIMITS) as node:
        wait_for_hits(node, expected)
        # Slots move, with blocks in them, while blocks are loaded.
        failed = node.counters().get("load_failed_blocks", 0)
        with ThreadPoolExecutor(1) as mover:
            moved = mover.submit(cluster.move_slots, 400)
            rounds = 0
            while not moved.done() or rounds == 0:
                answers = ask_all(node, expected)
                assert [answer.cached for answer in answers] == [BLOCKS * BLOCK] * len(PROMPTS)
                rounds += 1
            moved.result()
        wait_for_hits(node, expected)
        assert node.counters().get("load_failed_blocks", 0) == failed


def test_nodes_that_freeze_and_die_cost_no_token(
    cluster: Cluster, llama: Path, expected: list[Answer], start: Callable[..., Node]
) -> None:
    with start(llama, pool=cluster.url, settings=SHORT_LIMITS) as node:
        wait_for_hits(node, expected)
        cluster.replace_silent_nodes()
        # A primary falls silent in the middle of loads, for longer than the others wait for it.
        silent = cluster.primaries()[-1]
        node.forget()
        numbers = [node.start(prompt) for prompt in PROMPTS]
        silent.freeze()
        try:
            answers = [node.answer(number) for number in numbers]
            assert [a.tokens for a in answers] == [a.tokens for a in expected]
            wait_for_hits(node, expected)
        finally:
            silent.thaw()
        # It is its replacement's replica from now on, and can replace that one.
        cluster.wait_until_whole()
        wait_for_hits(node, expected)

        # A primary is killed in the middle of loads; its replica takes over with what it copied.
        node.forget()
        numbers = [node.start(prompt) for prompt in PROMPTS]
        cluster.primaries()[-1].kill()
        answers = [node.answer(number) for number in numbers]
        assert [a.tokens for a in answers] == [a.tokens for a in expected]
        wait_for_hits(node, expected)

        # What is new goes where it belongs now. For a second after a put has failed nothing is
        # stored, so it may have to be computed twice.
        new = tokens(4 * BLOCK + 9, seed=99)
        said = node.ask(new).tokens

        def is_found() -> bool:
            node.forget()
            again = node.ask(new)
            assert again.tokens == said
            return again.cached == 4 * BLOCK

        eventually(is_found, node.counters)
