"""One engine computes, another, started later, loads: same tokens, same logprobs."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.node import Node

pytestmark = pytest.mark.e2e

LENGTHS = (3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 7 * BLOCK + 100)
"""Prompts that end beside, on and just behind a block border, and in the middle of a block."""


def test_second_process_loads(
    any_pool: str, llama: Path, plain: Node, start: Callable[..., Node]
) -> None:
    # Prompts of this pool's own: the reference engine lives on, and must not know them yet.
    seed = zlib.crc32(any_pool.encode())
    prompts = [tokens(length, seed=seed + length) for length in LENGTHS]
    turn = tokens(2 * BLOCK + 50, seed=seed)
    with start(llama, pool=any_pool) as first:
        for prompt in prompts:
            first.ask(prompt)
        said = list(first.ask(turn, max_tokens=BLOCK + 60).tokens)
        first.wait_for("stored_blocks", sum(n // BLOCK for n in LENGTHS) + 3)
    next_turn = turn + said + tokens(40, seed=seed + 1)

    with start(llama, pool=any_pool) as second:
        loaded = 0
        for prompt in prompts:
            cold, own_hit, answer = plain.ask(prompt), plain.ask(prompt), second.ask(prompt)
            reachable = (len(prompt) - 1) // BLOCK * BLOCK
            assert answer.cached == own_hit.cached == reachable
            assert answer.text == own_hit.text
            assert answer.tokens == cold.tokens
            loaded += reachable

        assert list(plain.ask(turn, max_tokens=BLOCK + 60).tokens) == said
        own_hit, answer = plain.ask(next_turn), second.ask(next_turn)
        generated_too = (len(turn) + len(said) - 1) // BLOCK * BLOCK
        assert generated_too > len(turn)
        assert answer.cached == own_hit.cached == generated_too
        assert answer.text == own_hit.text
        loaded += generated_too

        counters = second.counters()
        assert counters["loaded_tokens"] == loaded
        assert counters.get("load_failed_blocks", 0) == 0
        # Only the block that the longer prompt fills is new; nothing is stored twice.
        assert counters["stored_bytes"] <= KV_BYTES_PER_BLOCK


@pytest.mark.alone
def test_what_loads_save_is_what_computing_takes(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    length = 7 * BLOCK + 100
    prompts = [tokens(length, seed=7_000 + n) for n in range(10)]
    pool = f"file://{tmp_path}/saved?size=1GiB"
    with start(llama, pool=pool) as first:
        for prompt in prompts[:5]:
            first.ask(prompt, max_tokens=1)
        first.wait_for("stored_blocks", 5 * (length // BLOCK))
    # Where the machine is slow for a moment, the default might compute what could be loaded.
    with start(llama, pool=pool, settings={"penstock.load_policy": "always"}) as second:
        # Its first requests set things up.
        computed = [second.ask(prompt, max_tokens=1) for prompt in prompts[5:]]
        loaded = [second.ask(prompt, max_tokens=1) for prompt in prompts[:5]]
        assert [answer.cached > 0 for answer in (*computed, *loaded)] == [False] * 5 + [True] * 5
        second.wait_for("prefill_saved_seconds", 0.0001)
        counters = second.counters()
    saved = counters["prefill_saved_seconds"] - counters["load_wait_seconds"]
    usual = statistics.median(answer.seconds for answer in computed)
    seen = sum(usual - answer.seconds for answer in loaded)
    # Other programs use the machine too.
    assert seen / 3 < saved < 3 * seen, (counters, computed, loaded)
