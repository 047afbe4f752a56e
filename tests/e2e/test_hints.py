"""Hints on the real vLLM: what is kept outlives a flood, what is let go is gone, and what comes
next is there before it is asked for."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from lab.engines.node import Node
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.stored import LIMIT, all_stored
from tests.servers import Server

pytestmark = pytest.mark.e2e

BLOCKS = 4
LENGTH = BLOCKS * BLOCK + 20
ROOM = 40
"""Blocks that a small pool has room for."""
AT_ONCE = 5
"""Prompts whose blocks are half of that."""
KEEP, LET_GO, PREFETCH = "penstock.keep", "penstock.let_go", "penstock.prefetch"


@pytest.fixture(params=["file", pytest.param("shm", marks=pytest.mark.full)])
def small_pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    size = (ROOM + 2) * KV_BYTES_PER_BLOCK
    if request.param == "file":
        yield f"file://{tmp_path}/pool?size={size}"
        return
    name = f"test-{uuid.uuid4().hex}"
    try:
        yield f"shm://{name}?size={size}"
    finally:
        Path(f"/dev/shm/penstock-{name}").unlink(missing_ok=True)


def flood(node: Node, seed: int, prompts: int = 26, *, kept: int = 0, **options: Any) -> None:
    """Asks so many other prompts that the pool gives its room away twice, and waits until they are
    stored. A pool of this size gives its room away between two touches. So with `kept` blocks, this
    asks for a part of its room at a time, and waits until all of them were touched."""
    since = node.counters()
    for number in range(prompts):
        node.ask(tokens(LENGTH, seed=seed + number), **options)
        if kept and number % AT_ONCE == 0:
            touched = node.counters().get("touched_blocks", 0)
            # One round may have begun before.
            node.wait_for("touched_blocks", touched + 2 * kept, timeout=LIMIT)
    all_stored(node, prompts * BLOCKS, since=since)


def cached(node: Node, prompt: list[int], expected: tuple[int, ...], **options: Any) -> int:
    """Tokens of the prompt that come from the pool. The answer is as without a pool."""
    node.forget()
    answer = node.ask(prompt, **options)
    assert answer.tokens == expected
    return answer.cached


def objects(pool: str) -> int:
    """Blocks in the pool. Beside the engine's namespace there is one with a description."""
    with penstock.open(pool) as opened:
        return max(one.objects for one in opened.namespaces())


def test_a_kept_conversation_outlives_a_flood_that_evicts_another(
    small_pool: str, llama: Path, plain: Node, start: Callable[..., Node]
) -> None:
    kept, other = (tokens(LENGTH, seed=17_00 + n) for n in range(2))
    expected = [plain.ask(prompt).tokens for prompt in (kept, other)]
    # Shared memory has its values in whole pages: four blocks take more than a tenth of 40.
    shares = {"penstock.keep_share_of_one": 0.25}
    with start(llama, pool=small_pool, settings=shares) as node:
        assert node.ask(kept, params={KEEP: 600}).tokens == expected[0]
        assert node.ask(other).tokens == expected[1]
        all_stored(node, 2 * BLOCKS)
        # What does not come in time to the pool is kept no more. Here it is, from now on.
        node.ask(kept, params={KEEP: 600})
        flood(node, 17_10, kept=BLOCKS)
        assert cached(node, kept, expected[0]) == BLOCKS * BLOCK
        assert cached(node, other, expected[1]) == 0
        counters = node.counters()
        assert counters["keep_hints"] == 2
        assert counters["touched_blocks"] >= 3 * BLOCKS
        assert counters.get("keep_refused_blocks", 0) == 0


def test_a_tenant_that_keeps_everything_pushes_nobody_out(
    small_pool: str, llama: Path, plain: Node, start: Callable[..., Node]
) -> None:
    def of(tenant: str, **hints: Any) -> dict[str, Any]:
        return {"cache_salt": tenant, "params": {"penstock.tenant": tenant, **hints}}

    kept, fresh = (tokens(LENGTH, seed=17_40 + n) for n in range(2))
    expected = [plain.ask(prompt).tokens for prompt in (kept, fresh)]
    shares = {"penstock.keep_share": 0.5, "penstock.keep_share_of_one": 0.25}
    with start(llama, pool=small_pool, settings=shares) as node:
        flood(node, 17_50, prompts=8, **of("red", **{KEEP: 600}))
        # Red has all that it may have. Blue's is kept all the same.
        since = node.counters()
        assert node.ask(kept, **of("blue", **{KEEP: 600})).tokens == expected[0]
        all_stored(node, BLOCKS, since=since)
        node.ask(kept, **of("blue", **{KEEP: 600}))
        flood(node, 17_60, kept=ROOM // 4 + BLOCKS, **of("red", **{KEEP: 600}))
        node.wait_for("keep_refused_blocks", 26 * BLOCKS - ROOM // 4, timeout=LIMIT)
        assert cached(node, kept, expected[0], **of("blue")) == BLOCKS * BLOCK
        # And what blue does not keep has as much room as red leaves to everybody.
        since = node.counters()
        assert node.ask(fresh, **of("blue")).tokens == expected[1]
        all_stored(node, BLOCKS, since=since)
        flood(node, 17_90, prompts=3, **of("red", **{KEEP: 600}))
        assert cached(node, fresh, expected[1], **of("blue")) == BLOCKS * BLOCK


def test_what_is_let_go_leaves_the_pool(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    prompt = tokens(LENGTH, seed=17_100)
    other = prompt[: 2 * BLOCK] + tokens(BLOCK + 9, seed=17_101)
    expected = [plain.ask(each).tokens for each in (prompt, other)]
    with start(llama, pool=pool) as node:
        assert node.ask(prompt).tokens == expected[0]
        all_stored(node, BLOCKS)
        assert objects(pool) == BLOCKS
        # The last turn of this agent. Others go on with its first two blocks.
        last = [*prompt, *tokens(2 * BLOCK, seed=17_102)]
        answer = node.ask(last, params={LET_GO: 2 * BLOCK})
        assert answer.tokens == plain.ask(last).tokens
        node.wait_for("let_go_blocks", 2, timeout=LIMIT)
        assert objects(pool) == 2
        assert node.counters()["stored_blocks"] == BLOCKS, "nothing new was stored"
        assert cached(node, other, expected[1]) == 2 * BLOCK
        assert cached(node, prompt, expected[0]) == 2 * BLOCK


@pytest.mark.parametrize("salt", [None, "a salt"])
def test_a_prompt_that_comes_next_is_in_host_memory(
    salt: str | None, llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    prompt, working = tokens(LENGTH, seed=17_110), tokens(BLOCK + 9, seed=17_111)
    expected = plain.ask(prompt).tokens
    with Server("valkey", tmp_path) as server:
        with start(llama, pool=server.unix_url) as first:
            assert first.ask(prompt, cache_salt=salt).tokens == expected
            all_stored(first, BLOCKS)
        settings = {"penstock.host_tier": True}
        with start(llama, pool=server.unix_url, settings=settings) as second:
            # An agent works, and knows what it will ask then.
            number = second.start(
                working, max_tokens=40, cache_salt=salt, params={PREFETCH: prompt}
            )
            answer = second.answer(number)
            assert answer.tokens == plain.ask(working, max_tokens=40).tokens
            second.wait_for("prefetched_bytes", BLOCKS * KV_BYTES_PER_BLOCK, timeout=LIMIT)
            before = second.counters()
            # The pool is gone: only host memory can have it.
            server.kill()
            answer = second.ask(prompt, cache_salt=salt)
            assert (answer.tokens, answer.cached) == (expected, BLOCKS * BLOCK)
            after = second.counters()
            assert after["kept_bytes"] == BLOCKS * KV_BYTES_PER_BLOCK
            assert after.get("loaded_bytes", 0) == before.get("loaded_bytes", 0)
            assert after["prefetch_hints"] == 1


def test_wrong_hints_change_nothing(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    prompt = tokens(LENGTH, seed=17_120)
    expected = plain.ask(prompt).tokens
    with start(llama, pool=f"file://{tmp_path}/pool?size=1GiB") as node:
        wrong = {KEEP: "long", LET_GO: -3, PREFETCH: {"prompt": "next"}}
        assert node.ask(prompt, params=wrong).tokens == expected
        assert node.counters()["hints_refused"] == 3
        all_stored(node, BLOCKS)
        assert cached(node, prompt, expected, params=wrong) == BLOCKS * BLOCK
        assert node.log.read_text().count("penstock.keep is not followed") == 1


def test_parameters_that_are_no_object_change_nothing(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    # vLLM takes anything under this name in a request's `vllm_xargs`.
    prompt = tokens(LENGTH, seed=17_121)
    expected = plain.ask(prompt).tokens
    with start(llama, pool=f"file://{tmp_path}/pool?size=1GiB") as node:
        for given in ("text", 7, ["penstock.tenant", "red"], True):
            for _ in range(2):
                wrong = {"kv_transfer_params": given}
                assert node.ask(prompt, extra_args=wrong).tokens == expected
        all_stored(node, BLOCKS)
        assert cached(node, prompt, expected, extra_args=wrong) == BLOCKS * BLOCK
        log = node.log.read_text()
        for kind in ("str", "int", "list", "bool"):
            assert log.count(f"is no object but {kind}:") == 1
