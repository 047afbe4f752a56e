"""One engine computes, another, started later, loads: same tokens, same logprobs."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engines.node import Node
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.stored import all_stored

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
        answered = [*turn, *said][:-1]
        blocks = sum(n // BLOCK for n in LENGTHS) + len(answered) // BLOCK
        all_stored(first, blocks)
    next_turn = turn + said + tokens(40, seed=seed + 1)

    with start(llama, pool=any_pool, fresh=True) as second:
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


def test_what_loads_save_is_counted_with_loads_alone(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    """How near the figure comes to what is seen is for `benches.saved_seconds`: it depends on what
    else the machine does."""
    blocks = 7
    length = blocks * BLOCK + 100
    prompts = [tokens(length, seed=7_000 + n) for n in range(10)]
    pool = f"file://{tmp_path}/saved?size=1GiB"
    with start(llama, pool=pool) as first:
        for prompt in prompts[:5]:
            first.ask(prompt, max_tokens=1)
        all_stored(first, 5 * blocks)
    with start(llama, pool=pool) as second:
        computed = [second.ask(prompt, max_tokens=1) for prompt in prompts[5:]]
        counters = second.counters()
        assert [answer.cached for answer in computed] == [0] * 5
        assert counters.get("loaded_tokens", 0) == 0
        assert counters.get("prefill_saved_seconds", 0) == 0
        # They may have waited for the pool's answer, and then were computed.
        waited = [counters.get("load_wait_seconds", 0.0)]

        saved = [0.0]
        for number, prompt in enumerate(prompts[:5], 1):
            loaded = second.ask(prompt, max_tokens=1)
            counters = second.counters()
            assert loaded.cached == blocks * BLOCK
            assert counters["loaded_tokens"] == number * blocks * BLOCK
            saved.append(counters["prefill_saved_seconds"])
            waited.append(counters["load_wait_seconds"])
            assert 0 < waited[-1] - waited[-2] <= loaded.seconds
            # As long as this engine's own steps take, and they are a part of what their requests
            # took.
            longest = max(answer.seconds for answer in computed)
            assert 0 < saved[-1] - saved[-2] <= longest

        # Neither what the engine has itself nor what it computes saves more.
        assert second.ask(prompts[5], max_tokens=1).cached == blocks * BLOCK
        assert second.ask(tokens(length, seed=7_100), max_tokens=1).cached == 0
        assert second.counters()["prefill_saved_seconds"] == saved[-1]
