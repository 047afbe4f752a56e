"""Models that have KV of fewer layers than they have layers, or of more: loads are right, whatever
the layout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from lab.engines.node import Node
from lab.models import attention
from penstock.vllm.scheduler.orders import Orders
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored

pytestmark = pytest.mark.e2e

PROMPT = tokens(20 * BLOCK + 5, seed=5)


# In two groups: layers that attend to all tokens, and layers with a window. Gemma's last layers use
# the KV of others; the looped model's layers run twice. Where vLLM keeps each layer in one piece it
# makes pages of one size, so the small heads have blocks of 1,024 tokens.
@pytest.mark.parametrize(
    ("make", "layout", "blocks"),
    [
        (attention.gemma3n, "BLHNC", 20 + 20),
        (attention.gemma4, "LBHNC", 20 + 2),
        pytest.param(attention.looped, "BLHNC", 20 + 20, marks=pytest.mark.full),
    ],
    ids=["gemma3n", "gemma4", "looped"],
)
def test_what_is_loaded_gives_the_same_tokens(
    make: Callable[[Path], Path],
    layout: str,
    blocks: int,
    start: Callable[..., Node],
    tmp_path: Path,
) -> None:
    model, pool = make(tmp_path / "model"), f"file://{tmp_path}/pool?size=1GiB"
    with start(model) as alone:
        cold, own_hit = alone.ask(PROMPT), alone.ask(PROMPT)
        assert own_hit.cached > 0
    with start(model, pool=pool) as first:
        assert f"KV layout {layout}: " in first.log.read_text()
        assert first.ask(PROMPT).tokens == cold.tokens
        all_stored(first, blocks)
    with start(model, pool=pool) as second:
        loaded = second.ask(PROMPT)
        assert (loaded.cached, loaded.text) == (own_hit.cached, own_hit.text)
        assert second.counters()["loaded_tokens"] == own_hit.cached


GIVEN_AWAY = "a store's blocks are given away"


def say_what_is_given_away() -> None:
    """Called in an engine's process."""
    flush = Orders.flush

    def said(self: Orders, stores: Iterable[int]) -> None:
        for store in (given := list(stores)):
            print(GIVEN_AWAY, store, file=sys.stderr, flush=True)
        flush(self, given)

    Orders.flush = said  # type: ignore[method-assign]


def test_a_store_keeps_the_blocks_that_leave_the_window(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    """vLLM gives a block of 1,024 tokens that left the window to the very next step. What a store
    has not read by then is lost."""
    with start(
        attention.gemma4(tmp_path / "model"),
        pool=f"file://{tmp_path}/pool?size=1GiB",
        prepare="tests.e2e.test_shared_layers:say_what_is_given_away",
    ) as node:
        node.ask(PROMPT)
        all_stored(node, 20 + 2)
        assert GIVEN_AWAY not in node.log.read_text()
