"""Speculative decoding beside the pool: the same hits, and no rejected token in a stored block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Answer, Node
from lab.models import drafts
from lab.models.drafts import Drafted
from tests.e2e.conftest import BLOCK, tokens

pytestmark = pytest.mark.e2e

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}

ANSWER = 30
"""Tokens of an answer."""


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


METHODS = (
    "draft_model",
    "narrow",
    # `test_exactness` has this one too.
    pytest.param("eagle", marks=pytest.mark.soak),
    "eagle3",
    "mtp",
)


@pytest.fixture(scope="module", params=METHODS)
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    return drafts.drafted(request.param, tmp_path_factory.mktemp(request.param))


def guesses(node: Node, ask: Callable[[], Answer]) -> tuple[Answer, float, float]:
    """An answer, and how many tokens were guessed and accepted for it."""
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    before = node.counters()
    answer = ask()
    after = node.counters()
    guessed, accepted = (after.get(name, 0) - before.get(name, 0) for name in names)
    return answer, guessed, accepted


def legacy_hashes() -> dict[str, bool]:
    """The option for hashes that do not look ahead, where vLLM has it."""
    from vllm.config import SpeculativeConfig

    name = "disable_lookahead_block_hashes"
    return {name: True} if name in SpeculativeConfig.__dataclass_fields__ else {}


def test_a_drafter_goes_on_from_what_is_loaded(
    drafted: Drafted, start: Callable[..., Node], tmp_path: Path
) -> None:
    """Another process answers as vLLM does after a hit of its own, and guesses as well."""
    pool = f"file://{tmp_path}/pool?size=1GiB"
    options = {"speculative_config": drafted.speculative_config}
    # Without a connector, hashes look ahead since 0.33, and the last block is not computed again.
    as_with_a_connector = {"speculative_config": drafted.speculative_config | legacy_hashes()}
    dropped = BLOCK if drafted.drops_last else 0
    asked = [tokens(length, seed=length) for length in (3 * BLOCK + 30, 3 * BLOCK, 2 * BLOCK + 1)]
    blocks = 3 + 3 + 2
    with start(drafted.model, pool=pool, **options) as first:
        for prompt in asked:
            first.ask(prompt, max_tokens=1)
        first.wait_for("stored_blocks", 2 * blocks)
    accepted_in_all = 0.0
    with (
        start(drafted.model, pool=pool, **options) as second,
        start(drafted.model, **as_with_a_connector) as alone,
    ):
        for prompt in asked:
            expected = (len(prompt) - 1) // BLOCK * BLOCK - dropped
            ask = partial(second.ask, prompt, max_tokens=ANSWER)
            loaded, guessed, accepted = guesses(second, ask)
            alone.ask(prompt, max_tokens=1)
            own, *of_own = guesses(alone, partial(alone.ask, prompt, max_tokens=ANSWER))
            assert loaded.cached == own.cached == expected
            assert loaded.text == own.text
            assert [guessed, accepted] == of_own
            assert guessed > 0
            accepted_in_all += accepted
        counters = second.counters()
        assert counters["loaded_tokens"] == sum(
            (len(prompt) - 1) // BLOCK * BLOCK - dropped for prompt in asked
        )
        assert counters.get("load_failed_blocks", 0) == 0
    assert accepted_in_all > 0
    # Without a drafter, the model's own blocks are found all the same, and all of them.
    with start(drafted.model, pool=pool) as plain:
        for prompt in asked:
            assert plain.ask(prompt, max_tokens=1).cached == (len(prompt) - 1) // BLOCK * BLOCK


def test_without_the_drafters_blocks_a_prompt_is_computed(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    """What an engine without a drafter stores is of no use to a drafter."""
    drafted = drafts.drafted("eagle", tmp_path)
    pool = f"file://{tmp_path}/pool?size=1GiB"
    prompt = tokens(2 * BLOCK + 30, seed=3)
    with start(drafted.model, pool=pool) as plain:
        expected = plain.ask(prompt)
        plain.wait_for("stored_blocks", 2)
    with start(drafted.model, pool=pool, speculative_config=drafted.speculative_config) as node:
        answer = node.ask(prompt)
        assert answer.cached == 0
        assert answer.tokens == expected.tokens
        # The model's own blocks are there already.
        node.wait_for("stored_blocks", 2)


def test_a_drafter_on_two_ranks_and_on_one_find_each_others_objects(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    """The draft model has one KV head, so both ranks hold it; the model has two."""
    drafted = drafts.drafted("narrow", tmp_path)
    options: dict[str, Any] = {
        "pool": f"file://{tmp_path}/pool?size=1GiB",
        "settings": {"penstock.pool_geometry": "portable"},
        "speculative_config": drafted.speculative_config,
    }
    two = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    prompt = tokens(2 * BLOCK + 30, seed=8)
    with start(drafted.model, **options, **two) as first:
        first.ask(prompt, max_tokens=1)
        own = guesses(first, partial(first.ask, prompt, max_tokens=ANSWER))
        first.wait_for("stored_blocks", 2 * 2)
    with start(drafted.model, **options) as second:
        loaded = guesses(second, partial(second.ask, prompt, max_tokens=ANSWER))
        assert loaded[0].cached == own[0].cached == 2 * BLOCK
        assert loaded[0].tokens == own[0].tokens
        # Two ranks and one round differently, so a guess may differ here and there.
        assert loaded[2] == pytest.approx(own[2], abs=3)
        assert loaded[2] > 0
        assert second.counters()["stored_bytes"] == 0
