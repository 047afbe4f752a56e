"""Blocks that a store reads are held in vLLM's own block pool, where vLLM would overwrite them
before workers learn that they have changed hands."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from penstock.vllm import compat
from penstock.vllm.groups import Group
from tests.connector.engine import Asked, PlainEngine

FULL = Group(0, "full_attention", 4, None, "bfloat16", ())
PROMPT = list(range(100, 121))
"""Five blocks and a token."""


class PooledEngine(PlainEngine):
    """An engine whose blocks are those of vLLM's block pool."""

    def __init__(self, *, blocks: int, **options: Any) -> None:
        super().__init__([FULL], **options)
        # One more, as vLLM keeps a block that stands for none.
        self.vllm = BlockPool(blocks + 1, enable_caching=True, hash_block_size=4)
        self.half.bind(compat.BlockPool(self.vllm))

    @property
    def free(self) -> int:
        return self.vllm.get_num_free_blocks()

    def allocate(self, request: Asked, tokens: int) -> None:
        [table] = request.tables = request.tables or [[]]
        while len(table) * FULL.block_size < tokens:
            table.append(self.vllm.get_new_blocks(1)[0].block_id)

    def take_back(self, request: Asked) -> None:
        """As vLLM does with blocks of a request that it preempts, or that is over."""
        self.vllm.free_blocks([self.vllm.blocks[block] for block in reversed(request.tables[0])])


def computed(engine: PooledEngine, request: Asked) -> list[int]:
    """Computes a prompt. Returns the blocks that its store reads."""
    assert engine.match(request) == 0
    [store] = engine.step({request.request_id: request.num_tokens}).stores
    return store.blocks.block_ids


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_preempted_request_gives_its_blocks_once_all_ranks_have_read_them(ranks: int) -> None:
    engine = PooledEngine(blocks=6, ranks=ranks, holds_blocks=True)
    request = engine.ask("r", PROMPT)
    reads = computed(engine, request)
    engine.take_back(request)
    # The scheduler looks for room in the step in which it preempts, before it tells anyone.
    given = ids(engine.vllm.get_new_blocks(engine.free))
    assert len(given) == 1
    assert given.isdisjoint(reads)
    assert engine.free == 0
    for part in list(engine.parts):
        assert engine.free == 0
        engine.end(part)
    assert ids(engine.vllm.get_new_blocks(engine.free)) == set(reads)


def ids(blocks: list[KVCacheBlock]) -> set[int]:
    return {block.block_id for block in blocks}


def test_without_need_nothing_is_held() -> None:
    engine = PooledEngine(blocks=6, holds_blocks=False)
    request = engine.ask("r", PROMPT)
    reads = computed(engine, request)
    engine.take_back(request)
    assert set(reads) <= ids(engine.vllm.get_new_blocks(engine.free))


def test_a_dropped_store_lets_go_too() -> None:
    engine = PooledEngine(blocks=6, holds_blocks=True)
    request = engine.ask("r", PROMPT)
    reads = computed(engine, request)
    engine.take_back(request)
    [part] = engine.parts
    engine.end(part, missing=range(len(reads)))
    assert engine.free == 6


def test_the_prefix_cache_can_be_reset_once_all_is_read() -> None:
    engine = PooledEngine(blocks=6, holds_blocks=True)
    request = engine.ask("r", PROMPT)
    computed(engine, request)
    assert engine.finish(request)
    engine.take_back(request)
    assert not engine.vllm.reset_prefix_cache()
    engine.settle()
    assert engine.vllm.reset_prefix_cache()


def test_the_end_of_a_prompt_leaves_the_prefix_cache_first() -> None:
    engine = PooledEngine(blocks=6, holds_blocks=True)
    request = engine.ask("r", PROMPT)
    reads = computed(engine, request)
    for block, block_hash in zip(reads, request.block_hashes, strict=True):
        engine.vllm._insert_block_hash(block_hash + bytes(4), engine.vllm.blocks[block], 4)
    engine.take_back(request)
    engine.settle()
    # A block without a hash goes first.
    order = [engine.vllm.get_new_blocks(1)[0].block_id for _ in range(6)]
    assert order[1:] == list(reversed(reads))
