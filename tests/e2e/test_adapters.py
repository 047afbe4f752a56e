"""LoRA adapters: blocks computed with one content are never loaded for another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engines.node import Adapter, Node
from lab.models import attention
from tests.e2e.conftest import BLOCK, tokens

pytestmark = pytest.mark.e2e

PROMPT = tokens(4 * BLOCK + 5, seed=41)
FULL = 4 * BLOCK


@pytest.fixture
def serve(llama: Path, start: Callable[..., Node], tmp_path: Path) -> Callable[..., Node]:
    """Starts engines with adapters over one pool."""
    pool = f"file://{tmp_path}/pool?size=1GiB"

    def run(**options: object) -> Node:
        return start(llama, pool=pool, enable_lora=True, max_lora_rank=8, **options)

    return run


def test_an_adapter_trained_again_under_its_path_never_hits(
    serve: Callable[..., Node], llama: Path, tmp_path: Path
) -> None:
    """Three servers, one after the other, over one pool: the content decides, not name or path."""
    adapter = Adapter("writer", 1, str(attention.lora(tmp_path / "writer", llama, seed=1)))
    with serve() as node:
        base = node.ask(PROMPT)
        first = node.ask(PROMPT, adapter=adapter)
        own_hit = node.ask(PROMPT, adapter=adapter)
        node.wait_for("stored_blocks", 2 * 4)
        assert first.cached == 0
        assert own_hit.cached == FULL
        assert first.tokens != base.tokens
    attention.lora(Path(adapter.lora_path), llama, seed=2)
    with serve() as node:
        second = node.ask(PROMPT, adapter=adapter)
        node.wait_for("stored_blocks", 4)
        assert second.cached == 0
        assert second.tokens != first.tokens
        # The base model's blocks are of no adapter.
        assert node.ask(PROMPT).cached == FULL
    attention.lora(Path(adapter.lora_path), llama, seed=1)
    with serve() as node:
        again = node.ask(PROMPT, adapter=adapter)
        assert again.cached == FULL
        assert again.text == own_hit.text
        assert node.counters()["loaded_tokens"] == FULL


def test_adapters_loaded_at_run_time(
    serve: Callable[..., Node], llama: Path, tmp_path: Path
) -> None:
    """In one server: a new number for the new content shares; so does content replaced in place,
    but what it replaced does not any more."""
    folder = attention.lora(tmp_path / "writer", llama, seed=1)
    first, second = (Adapter("writer", number, str(folder)) for number in (1, 2))
    with serve(max_loras=2, max_cpu_loras=2) as node:
        node.load_adapter(first)
        cold = node.ask(PROMPT, adapter=first)
        node.wait_for("stored_blocks", 4)
        attention.lora(folder, llama, seed=2)
        # As vLLM's server does after an unload: the same name and path, another number.
        node.load_adapter(second)
        trained = node.ask(PROMPT, adapter=second)
        assert trained.cached == 0
        assert trained.tokens != cold.tokens
        node.wait_for("stored_blocks", 2 * 4)
        # The first is still what this engine computes with under its number.
        node.forget()
        assert node.ask(PROMPT, adapter=first).cached == FULL
        assert node.counters()["loaded_tokens"] == FULL

        # The third content in place of the first.
        attention.lora(folder, llama, seed=3)
        node.load_adapter(first, in_place=True)
        replaced = node.ask(PROMPT, adapter=first)
        assert replaced.cached == 0
        assert replaced.tokens not in (cold.tokens, trained.tokens)
        node.wait_for("stored_blocks", 3 * 4)
        # Back to the first in place: this engine may have named blocks of either by it.
        attention.lora(folder, llama, seed=1)
        node.load_adapter(first, in_place=True)
        node.forget()
        back = node.ask(PROMPT, adapter=first)
        assert back.cached == 0
        assert back.tokens == cold.tokens
    with serve() as node:
        assert node.ask(PROMPT, adapter=first).cached == FULL


def test_an_adapter_that_a_worker_reads_again_changed_is_not_shared(
    serve: Callable[..., Node], llama: Path, tmp_path: Path
) -> None:
    """vLLM pushes an adapter out for another and reads it again from its folder, which holds
    something else now: nothing computed with that is stored under the old content's name."""
    folder = attention.lora(tmp_path / "writer", llama, seed=1)
    writer = Adapter("writer", 1, str(folder))
    other = Adapter("other", 2, str(attention.lora(tmp_path / "other", llama, seed=5)))
    unseen = tokens(4 * BLOCK + 5, seed=42)
    with serve(max_loras=1, max_cpu_loras=1) as node:
        node.ask(PROMPT, adapter=writer)
        node.wait_for("stored_blocks", 4)
        node.ask(PROMPT, adapter=other)
        node.wait_for("stored_blocks", 2 * 4)
        attention.lora(folder, llama, seed=2)
        changed = node.ask(unseen, adapter=writer)
        node.wait_for("stores_dropped", 4)
        assert "files have changed since" in node.log.read_text()
        assert node.counters()["stored_blocks"] == 2 * 4
    with serve() as node:
        assert node.ask(unseen, adapter=writer).tokens == changed.tokens
        assert node.counters().get("loaded_tokens", 0) == 0
