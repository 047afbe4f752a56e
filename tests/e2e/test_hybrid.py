"""A model whose layers attend to all tokens or to a window: two groups, two block tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.engines.node import Node
from lab.models import attention
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored

pytestmark = pytest.mark.e2e

WINDOW_BLOCKS = 2
"""Blocks that the model's window of 256 tokens reaches into."""
GROUP_BYTES = 2 * 2 * 2 * 64 * 4 * BLOCK
"""A block of one group: layers, K and V, KV heads, head size, bytes of float32, tokens."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return attention.gemma2(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def pooled(
    gemma: Path, start: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Node, Path]]:
    """An engine, and its pool's folder."""
    folder = tmp_path_factory.mktemp("pooled") / "pool"
    with start(gemma, pool=f"file://{folder}?size=1GiB") as node:
        yield node, folder


def values(folder: Path) -> set[Path]:
    """The files of all blocks."""
    size = GROUP_BYTES + 64
    return {path for path in folder.rglob("*") if path.is_file() and path.stat().st_size == size}


def counted(node: Node, before: dict[str, float], name: str) -> float:
    """What was counted since."""
    return node.counters().get(name, 0) - before.get(name, 0)


def test_only_the_last_window_is_loaded(pooled: tuple[Node, Path]) -> None:
    node, _ = pooled
    prompt = tokens(9 * BLOCK + 5, seed=1)
    before = node.counters()
    cold, own_hit = node.ask(prompt), node.ask(prompt)
    all_stored(node, 2 * 9, since=before)
    node.forget()
    before = node.counters()
    loaded = node.ask(prompt)
    assert loaded.cached == own_hit.cached == 9 * BLOCK
    assert loaded.text == own_hit.text
    assert loaded.tokens == cold.tokens
    assert counted(node, before, "loaded_tokens") == 9 * BLOCK
    assert counted(node, before, "loaded_bytes") == (9 + WINDOW_BLOCKS) * GROUP_BYTES


def test_a_missing_block_of_either_group_makes_the_hit_shorter(pooled: tuple[Node, Path]) -> None:
    node, folder = pooled
    prompt = tokens(8 * BLOCK + 5, seed=2)
    # With its end, the pool gets a prompt's last block: the files are those of the seventh.
    for end in (6, 7):
        others, before = values(folder), node.counters()
        node.ask(prompt[: end * BLOCK + 1], max_tokens=1)
        all_stored(node, 2 * 6 if end == 6 else 2, since=before)
    seventh = values(folder) - others
    assert len(seventh) == 2
    before = node.counters()
    cold = node.ask(prompt)
    all_stored(node, 2, since=before)
    for path in sorted(seventh):
        path.unlink()
        node.forget()
        before = node.counters()
        # Full attention goes on from the sixth. So does the window, as both later ends need it.
        answer = node.ask(prompt)
        assert answer.cached == 6 * BLOCK
        assert answer.tokens == cold.tokens
        # It was computed, and so it is stored again.
        all_stored(node, 1, since=before)
        assert path.exists()


def test_a_damaged_block_of_either_group_is_recomputed(pooled: tuple[Node, Path]) -> None:
    node, folder = pooled
    prompt = tokens(6 * BLOCK + 5, seed=3)
    others, before = values(folder), node.counters()
    cold = node.ask(prompt)
    all_stored(node, 2 * 6, since=before)
    damaged = values(folder) - others
    assert len(damaged) == 2 * 6
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[1000] ^= 1
        path.write_bytes(content)
    node.forget()
    before = node.counters()
    assert node.ask(prompt).tokens == cold.tokens
    assert counted(node, before, "rejected_objects") >= 1
    assert counted(node, before, "loaded_tokens") == 0


def test_blocks_that_leave_the_window_are_read_before_they_are_given_away(
    gemma: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    """Under a tiny KV cache, chunk by chunk: blocks of the window are reused within a prompt."""
    prompts = [tokens(6 * BLOCK + 20 * i, seed=30 + i) for i in range(6)]
    options = {
        "pool": f"file://{tmp_path}/pool?size=1GiB",
        "kv_cache_memory_bytes": 40 * GROUP_BYTES,
        "max_model_len": 1024,
        "max_num_batched_tokens": 2 * BLOCK,
    }
    with start(gemma, **options) as first:
        alone = [first.ask(prompt, max_tokens=BLOCK + 10).tokens for prompt in prompts]
        all_stored(first, 2 * 6 * len(prompts))
    with start(gemma, **options) as second:
        for _ in range(2):
            running = [second.start(prompt, max_tokens=BLOCK + 10) for prompt in prompts]
            assert [second.answer(number).tokens for number in running] == alone
            second.forget()
        counters = second.counters()
        assert counters["loaded_tokens"] > 0
        assert counters.get("rejected_objects", 0) == 0
