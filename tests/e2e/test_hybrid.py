"""A model whose layers attend to all tokens or to a window: two groups, two block tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import models
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.node import Node

pytestmark = pytest.mark.e2e

WINDOW_BLOCKS = 2
"""Blocks that the model's window of 256 tokens reaches into."""
GROUP_BYTES = 2 * 2 * 2 * 64 * 4 * BLOCK
"""A block of one group: layers, K and V, KV heads, head size, bytes of float32, tokens."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.gemma2(tmp_path_factory.mktemp("gemma"))


# A block that leaves the window is given back, stored or not. With another engine on the same two
# cores, one may not be stored.
@pytest.mark.alone
def test_only_the_last_window_is_loaded(
    gemma: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    prompt = tokens(9 * BLOCK + 5, seed=1)
    with start(gemma, pool=f"file://{tmp_path}/pool?size=1GiB") as node:
        cold, own_hit = node.ask(prompt), node.ask(prompt)
        node.wait_for("stored_blocks", 2 * 9)
        node.forget()
        loaded = node.ask(prompt)
        assert loaded.cached == own_hit.cached == 9 * BLOCK
        assert loaded.text == own_hit.text
        assert loaded.tokens == cold.tokens
        counters = node.counters()
        assert counters["loaded_tokens"] == 9 * BLOCK
        assert counters["loaded_bytes"] == (9 + WINDOW_BLOCKS) * GROUP_BYTES


@pytest.mark.alone
def test_a_missing_window_makes_the_hit_shorter(
    gemma: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    folder = tmp_path / "pool"
    prompt = tokens(8 * BLOCK + 5, seed=2)
    with start(gemma, pool=f"file://{folder}?size=1GiB") as node:
        cold = node.ask(prompt)
        node.wait_for("stored_blocks", 2 * 8)
        # Of a prompt the end counts as used first: this is one of the last two of either group.
        # Its time of use lies the longest before it was written.
        ages = {path: path.stat().st_ctime_ns - path.stat().st_mtime_ns for path in values(folder)}
        max(ages, key=lambda path: ages[path]).unlink()
        node.forget()
        answer = node.ask(prompt)
        assert answer.tokens == cold.tokens
        assert answer.cached in (6 * BLOCK, 7 * BLOCK)


def values(folder: Path) -> list[Path]:
    """The files of all blocks."""
    size = GROUP_BYTES + 64
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size == size]


@pytest.mark.alone
def test_a_damaged_block_of_either_group_is_recomputed(
    gemma: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    folder = tmp_path / "pool"
    prompt = tokens(6 * BLOCK + 5, seed=3)
    with start(gemma, pool=f"file://{folder}?size=1GiB") as node:
        cold = node.ask(prompt)
        node.wait_for("stored_blocks", 2 * 6)
        for path in values(folder):
            content = bytearray(path.read_bytes())
            content[1000] ^= 1
            path.write_bytes(content)
        node.forget()
        assert node.ask(prompt).tokens == cold.tokens
        counters = node.counters()
        assert counters["rejected_objects"] >= 1
        assert counters.get("loaded_tokens", 0) == 0


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
    with start(gemma, **options) as second:
        for _ in range(2):
            running = [second.start(prompt, max_tokens=BLOCK + 10) for prompt in prompts]
            assert [second.answer(number).tokens for number in running] == alone
            second.forget()
        counters = second.counters()
        assert counters["loaded_tokens"] > 0
        assert counters.get("rejected_objects", 0) == 0
