"""Speculative decoding beside the pool: the same hits, and no rejected token in a stored block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.node import Node, StartError

pytestmark = pytest.mark.e2e

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}

ANSWER = 30
"""Tokens of an answer. With n-grams, vLLM on CPUs takes long for each."""


def prompts() -> list[list[int]]:
    """Prompts with phrases that come again and again, so that n-grams are found in them."""
    made = []
    for number in range(2):
        phrase = tokens(23, seed=900 + number)
        made.append((phrase * 20)[: 2 * BLOCK - 20 + 3 * number])
    return made


def test_hits_are_those_without_speculation(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    loaded: dict[str, list[int]] = {}
    stored: dict[str, float] = {}
    for name, options in {"without": {}, "with": {"speculative_config": NGRAM}}.items():
        pool = f"file://{tmp_path}/{name}?size=1GiB"
        with start(llama, pool=pool, **options) as first:
            # The second block holds tokens that were guessed.
            said = [first.ask(prompt, max_tokens=ANSWER) for prompt in prompts()]
            first.wait_for("stored_blocks", 2 * len(said))
            counters = first.counters()
            stored[name] = counters["stored_blocks"]
            if name == "with":
                drafted = counters["spec_decode_num_draft_tokens"]
                assert 0 < counters["spec_decode_num_accepted_tokens"] < drafted
        with start(llama, pool=pool, **options) as second:
            loaded[name] = []
            for prompt, answer in zip(prompts(), said, strict=True):
                assert answer.tokens == plain.ask(prompt, max_tokens=ANSWER).tokens
                turn = [*prompt, *answer.tokens, *tokens(20, seed=1)]
                before = second.counters().get("loaded_tokens", 0)
                assert second.ask(turn).tokens == plain.ask(turn).tokens
                loaded[name].append(int(second.counters()["loaded_tokens"] - before))
    assert loaded["with"] == loaded["without"]
    assert all(count == 2 * BLOCK for count in loaded["with"])
    assert stored["with"] == stored["without"]


def test_drafts_with_layers_of_their_own_are_refused(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    draft = models.llama(tmp_path / "draft", layers=2)
    speculation: dict[str, Any] = {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": 2,
    }
    with pytest.raises(StartError, match=r"layers of its own .* or serve without Penstock"):
        start(llama, pool="memory:", speculative_config=speculation)
