"""Whatever way an engine is asked: what it loads gives what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Node
from lab.models import attention
from lab.waiting import eventually
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import LIMIT

pytestmark = pytest.mark.e2e

WAYS = ("four", "beams", "embeddings", "session", "kept", "waited_for", "aborted")
MODULE = "tests.e2e.ways"
EMBEDDING = f"{MODULE}:embedding"
PROMPT = 5 * BLOCK + 9
ENGINE: dict[str, Any] = {"enable_prompt_embeds": True, "dtype": "float32"}


@pytest.fixture(scope="module")
def alone(llama: Path, start: Callable[..., Node]) -> Iterator[Node]:
    with start(llama, **ENGINE) as node:
        yield node


@pytest.fixture(scope="module")
def pooled(
    llama: Path, start: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    pool = f"file://{tmp_path_factory.mktemp('ways')}/pool?size=1GiB"
    with start(llama, pool=pool, **ENGINE) as node:
        yield node


def loaded(node: Node, way: str, prompt: list[int]) -> Any:
    """The answers once blocks of them came from the pool."""
    before = node.counters().get("loaded_tokens", 0)

    def answers() -> Any:
        node.forget()
        found = node.way(f"{MODULE}:{way}", prompt)
        return found if node.counters().get("loaded_tokens", 0) > before else None

    return eventually(answers, node.counters, seconds=LIMIT)


@pytest.mark.parametrize("way", WAYS)
def test_loads_change_no_answer(way: str, alone: Node, pooled: Node) -> None:
    prompt = tokens(PROMPT, seed=900 + WAYS.index(way))
    cold = alone.way(f"{MODULE}:{way}", prompt)
    assert alone.way(f"{MODULE}:{way}", prompt) == cold, "vLLM's own hits change nothing here"
    assert pooled.way(f"{MODULE}:{way}", prompt) == cold
    assert loaded(pooled, way, prompt) == cold
    assert pooled.counters().get("load_failed_blocks", 0) == 0


def test_a_model_that_makes_embeddings(start: Callable[..., Node], tmp_path: Path) -> None:
    model, prompt = attention.qwen3(tmp_path / "model", text="ab"), [5, 6, 7] * 200
    options: dict[str, Any] = {"runner": "pooling", "convert": "embed", "dtype": "float32"}
    with start(model, **options) as node:
        cold = node.way(EMBEDDING, prompt)
    with start(model, pool=f"file://{tmp_path}/pool?size=1GiB", **options) as node:
        assert node.way(EMBEDDING, prompt) == cold
        # vLLM's own rule: hits are used where the kind of pooling allows it.
        node.forget(small=lambda node: node.way(EMBEDDING, [7, 8, 9]))
        assert node.way(EMBEDDING, prompt) == cold
