"""When the engine takes all blocks away: nothing moves to or from them, and requests begin anew."""

from __future__ import annotations

import pytest

from penstock.vllm.groups import Group
from tests.connector.engine import PlainEngine

FULL = Group(0, "full_attention", 4, None, "bfloat16", ())
TOKENS = range(4 * FULL.block_size + 1)
WHOLE = 4 * FULL.block_size


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_request_whose_load_is_given_up_may_load_again(*, is_whole: bool) -> None:
    engine = PlainEngine([FULL], ranks=2)
    engine.put_prompt(TOKENS)
    request = engine.ask("a", TOKENS)
    assert engine.match(request) == WHOLE
    engine.load(request, 0, WHOLE)
    engine.step({})
    first, second = engine.parts
    # One rank may have been done, before the engine took the blocks away.
    engine.end(first, late=() if is_whole else (0,))
    engine.half.on_transfers_ended()
    engine.end(second)
    assert engine.match(request) == WHOLE
    counts = engine.half.take_counts()
    assert counts is not None
    assert counts.get("loaded_tokens", 0) == 0
    engine.load(request, 0, WHOLE)
    engine.step({})
    engine.settle()
    counts = engine.half.take_counts()
    assert counts is not None
    assert counts["loaded_tokens"] == WHOLE


def test_a_store_that_no_rank_has_been_told_of_is_of_blocks_that_are_gone() -> None:
    engine = PlainEngine([FULL])
    request = engine.ask("a", TOKENS)
    engine.match(request)
    engine.step({"a": len(TOKENS) - 2})
    assert [job.is_stale for job in engine.orders[-1].stores] == [False]
    request.num_computed_tokens = len(TOKENS)
    assert engine.finish(request)
    engine.half.on_transfers_ended()
    orders = engine.step({})
    assert [job.is_stale for job in orders.stores] == [True]
    assert orders.finished == ["a"]


def test_blocks_that_stores_hold_are_freed_once() -> None:
    held: list[int] = []

    class Blocks:
        def watch_resets(self, is_reset: object) -> None:
            pass

        def is_cached(self, block_hash: bytes, group: int) -> bool:
            return False

        def hold(self, blocks: list[int]) -> None:
            held.extend(blocks)

        def free(self, blocks: list[int]) -> None:
            for block in blocks:
                held.remove(block)

    engine = PlainEngine([FULL], holds_blocks=True)
    engine.half.bind(Blocks())  # type: ignore[arg-type]
    request = engine.ask("a", TOKENS)
    engine.match(request)
    engine.step({"a": len(TOKENS)})
    assert len(held) == 4
    engine.half.on_transfers_ended()
    assert held == []
    engine.settle()
    assert held == []
