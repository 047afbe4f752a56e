"""A store that a third party brings is the pool; it costs hits, and nothing else, when it fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import SHORT_LIMITS, Answer, Node
from lab.waiting import eventually
from tests.e2e.conftest import BLOCK, tokens
from tests.pool.registered import PATH_VARIABLE, bring_troubled

pytestmark = pytest.mark.e2e

BLOCKS = 12
PROMPTS = [tokens(BLOCKS * BLOCK + 30, seed=350 + i) for i in range(3)]


@pytest.fixture(scope="module")
def expected(plain: Node) -> list[tuple[Answer, Answer]]:
    """For each prompt what vLLM computes, and its own prefix-cache hit."""
    return [(plain.ask(prompt), plain.ask(prompt)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("brought")


@pytest.fixture(scope="module")
def brought(folder: Path) -> dict[str, Any]:
    """Options of an engine whose processes find the example's store, and its troubled form."""
    folders = bring_troubled(folder / "site")
    return {
        "env": {PATH_VARIABLE: os.pathsep.join(map(str, folders))},
        "prepare": "tests.pool.registered:onto_path",
    }


@pytest.fixture(scope="module")
def filled(llama: Path, start: Callable[..., Node], brought: dict[str, Any], folder: Path) -> Path:
    """A database with all blocks of the prompts."""
    pool = folder / "pool.db"
    with start(llama, pool=f"sqlite://{pool}?size=1GiB", **brought) as first:
        for prompt in PROMPTS:
            first.ask(prompt)
        first.wait_for("stored_blocks", BLOCKS * len(PROMPTS))
    return pool


def ask_all(node: Node, expected: list[tuple[Answer, Answer]]) -> list[Answer]:
    """Asks every prompt anew; all answers must be right."""
    node.forget()
    answers = [node.ask(prompt) for prompt in PROMPTS]
    assert [a.tokens for a in answers] == [cold.tokens for cold, _ in expected]
    return answers


def wait_for_hits(node: Node, expected: list[tuple[Answer, Answer]]) -> list[Answer]:
    """Asks until everything comes from the pool."""

    def hits() -> list[Answer]:
        answers = ask_all(node, expected)
        return answers if all(answer.cached == BLOCKS * BLOCK for answer in answers) else []

    return eventually(hits, node.counters, pause=0.2)


def test_the_example_is_a_pool(
    llama: Path,
    start: Callable[..., Node],
    expected: list[tuple[Answer, Answer]],
    brought: dict[str, Any],
    filled: Path,
) -> None:
    with start(llama, pool=f"sqlite://{filled}?size=1GiB", **brought) as second:
        answers = wait_for_hits(second, expected)
        assert [a.text for a in answers] == [hit.text for _, hit in expected]
        assert second.counters().get("load_failed_blocks", 0) == 0


def test_a_store_in_trouble_costs_hits_and_nothing_else(
    llama: Path,
    start: Callable[..., Node],
    expected: list[tuple[Answer, Answer]],
    brought: dict[str, Any],
    filled: Path,
) -> None:
    in_trouble = filled.with_suffix(".db.trouble")
    with start(llama, pool=f"troubled://{filled}", settings=SHORT_LIMITS, **brought) as node:
        for trouble in ("raising", "dying", "sleeping"):
            before = node.counters()
            in_trouble.write_text(trouble)
            # One of the troubles lasts an hour: whatever had no limit would hang.
            for _ in range(2):
                ask_all(node, expected)
            after = node.counters()
            caught = ("lookup_failures", "load_failed_blocks")
            assert sum(after.get(name, 0) - before.get(name, 0) for name in caught) > 0, trouble
            in_trouble.unlink()
            wait_for_hits(node, expected)
