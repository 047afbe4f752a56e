"""Host memory in front of the pool: loads without it, prefetches for those that wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Node
from lab.waiting import eventually
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.stored import LIMIT, all_stored, all_tried
from tests.e2e.test_hybrid import gemma as gemma
from tests.e2e.test_parallel import TOPOLOGIES
from tests.servers import Server

pytestmark = pytest.mark.e2e

BLOCKS = 4
LONGEST = 8192
"""Tokens of the longest request that the model takes."""
PROMPTS = [tokens(BLOCKS * BLOCK + 7, seed=700 + i) for i in range(4)]
HOST_TIER = {"penstock.host_tier": True}


def hits(node: Node) -> list[Any]:
    """The engine's own prefix-cache hits, to compare with."""
    for prompt in PROMPTS:
        node.ask(prompt)
    return [node.ask(prompt).text for prompt in PROMPTS]


def test_loads_go_on_when_the_pool_is_gone(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    expected = hits(plain)
    with (
        Server("valkey", tmp_path) as server,
        start(llama, pool=server.unix_url, settings=HOST_TIER) as node,
    ):
        for prompt in PROMPTS:
            node.ask(prompt)
        all_tried(node, BLOCKS * len(PROMPTS))
        server.kill()
        node.forget()
        before = node.counters()
        answers = [node.ask(prompt) for prompt in PROMPTS]
        assert [answer.cached for answer in answers] == [BLOCKS * BLOCK] * len(PROMPTS)
        assert [answer.text for answer in answers] == expected
        after = node.counters()
        assert after["kept_bytes"] > before.get("kept_bytes", 0)
        assert after.get("loaded_bytes", 0) == 0
        # All of it is here: the pool was not even asked.
        assert after["lookups"] == before["lookups"]

        # What the pool cannot take is kept all the same.
        fresh = tokens(BLOCKS * BLOCK + 9, seed=790)
        cold = node.ask(fresh)

        def is_kept() -> bool:
            node.forget()
            again = node.ask(fresh)
            assert again.tokens == cold.tokens
            return again.cached == BLOCKS * BLOCK

        # Workers report with the steps of later requests.
        eventually(is_kept, node.counters, seconds=LIMIT)


def test_when_room_is_short_beginnings_of_prompts_stay(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    """Another prompt is likelier to share them: jobs say which block comes before which."""
    shared = 2
    # Seven of their nine blocks have room.
    first, second = tokens(4 * BLOCK + 7, seed=780), tokens(5 * BLOCK + 7, seed=781)
    other = first[: shared * BLOCK] + tokens(9, seed=782)
    with start(
        llama,
        pool=f"file://{tmp_path}/pool?size=1GiB",
        settings=HOST_TIER | {"penstock.host_bytes": 8 * KV_BYTES_PER_BLOCK},
    ) as node:
        node.ask(first)
        all_tried(node, 4)
        node.ask(second)
        all_tried(node, 9)
        expected = node.ask(other)
        node.forget()
        before = node.counters()
        again = node.ask(other)
        assert again.cached == shared * BLOCK
        assert again.tokens == expected.tokens
        after = node.counters()
        assert after["kept_bytes"] > before.get("kept_bytes", 0)
        assert after.get("loaded_bytes", 0) == before.get("loaded_bytes", 0)


def test_in_a_directory_the_end_of_a_prompt_counts_as_used_before_its_beginning(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    """Jobs say how many tokens come before a block: 0.4 ms earlier for each, says its file."""
    blocks = 1536 // BLOCK
    with start(llama, pool=f"file://{tmp_path}/pool?size=1GiB") as node:
        prompt = tokens(blocks * BLOCK + 7, seed=790)
        node.ask(prompt, max_tokens=1)
        all_stored(node, blocks)
        stored = {path: path.stat() for path in (tmp_path / "pool").glob("*/*/*")}
        stored = {path: stat for path, stat in stored.items() if stat.st_size > 4096}
        assert len(stored) == blocks
        # A file's status changes when it is put: how long the machine takes for the puts is not
        # in this.
        earlier = sorted(stat.st_ctime - stat.st_mtime for stat in stored.values())
        assert all(age > 0.9 * n * BLOCK * 0.0004 for n, age in enumerate(earlier) if n > 0)


@pytest.mark.parametrize("topology", ["tp2", pytest.param("pp3-1", marks=pytest.mark.full)])
def test_every_rank_holds_its_part(
    topology: str, llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    engine_args, env = TOPOLOGIES[topology]
    with start(
        llama,
        pool=f"file://{tmp_path}/pool?size=1GiB",
        settings=HOST_TIER,
        distributed_executor_backend="mp",
        env=env | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        **engine_args,
    ) as node:
        expected = hits(node)
        all_stored(node, BLOCKS * len(PROMPTS))
        node.forget()
        answers = [node.ask(prompt) for prompt in PROMPTS]
        assert [answer.cached for answer in answers] == [BLOCKS * BLOCK] * len(PROMPTS)
        assert [answer.text for answer in answers] == expected
        assert node.counters().get("loaded_bytes", 0) == 0


def test_what_waits_is_prefetched(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    expected = hits(plain)
    pool = f"file://{tmp_path}/pool?size=1GiB"
    with start(llama, pool=pool) as first:
        for prompt in PROMPTS:
            first.ask(prompt)
        all_stored(first, BLOCKS * len(PROMPTS))
    with start(
        llama, pool=pool, settings=HOST_TIER, max_num_seqs=1, max_model_len=LONGEST
    ) as second:
        # It has the only place until everything has come.
        busy = second.start(tokens(20, seed=1), max_tokens=LONGEST - 20)
        waiting = [second.start(prompt) for prompt in PROMPTS]
        aborted = second.start(tokens(BLOCKS * BLOCK + 7, seed=700), max_tokens=8)
        second.abort(aborted)
        wanted = BLOCKS * len(PROMPTS) * KV_BYTES_PER_BLOCK
        eventually(lambda: second.counters().get("prefetched_bytes", 0) >= wanted, second.counters)
        assert second.counters().get("loads", 0) == 0
        second.abort(busy)
        answers = [second.answer(number) for number in waiting]
        assert second.answer(busy).finish == "abort"
        assert [answer.cached for answer in answers] == [BLOCKS * BLOCK] * len(PROMPTS)
        assert [answer.text for answer in answers] == expected
        counters = second.counters()
        assert counters["prefetches"] >= len(PROMPTS)
        assert counters["kept_bytes"] == counters["prefetched_bytes"] == wanted
        assert counters.get("loaded_bytes", 0) == 0


def test_a_hybrid_model_keeps_its_windows(
    gemma: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    prompt = tokens(6 * BLOCK + 5, seed=61)
    with start(gemma, pool=f"file://{tmp_path}/pool?size=1GiB", settings=HOST_TIER) as node:
        node.ask(prompt)
        own_hit = node.ask(prompt)
        all_tried(node, 2 * 6)
        node.forget()
        loaded = node.ask(prompt)
        assert loaded.cached == own_hit.cached
        assert loaded.text == own_hit.text
        counters = node.counters()
        assert counters["kept_bytes"] > 0
        assert counters.get("loaded_bytes", 0) == 0
