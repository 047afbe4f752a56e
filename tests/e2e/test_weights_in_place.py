"""Weights that change while an engine runs: what was stored with other weights is never loaded, and
what was stored with the same ones is."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Answer, Node
from lab.engines.trainer import LIVE
from lab.models import attention
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored

pytestmark = pytest.mark.e2e

Start = Callable[..., Node]

ONE, OTHER, THIRD = (tokens(4 * BLOCK + 5, seed=seed) for seed in (5, 6, 7))
FOUND = 4 * BLOCK
EXTENSION = f"{__name__}.Extension"


class Extension:
    """Methods that an operator adds to vLLM's workers."""

    def look(self) -> int:
        """Changes nothing."""
        return sum(1 for _ in self.model_runner.get_model().parameters())  # type: ignore[attr-defined]

    def train(self) -> None:
        """Changes one element of one tensor, past all that vLLM offers for it."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        weight = dict(model.named_parameters())["model.embed_tokens.weight"]
        weight.data[ONE[0], 0] += 1


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return attention.llama(tmp_path_factory.mktemp("newer"), seed=1)


@pytest.fixture(scope="module")
def right(plain: Node, newer: Path, start: Start) -> dict[str, dict[str, tuple[int, ...]]]:
    """What vLLM alone says, by weights and prompt."""
    prompts = {"one": ONE, "other": OTHER, "third": THIRD}
    with start(newer) as node:
        new = {name: node.ask(prompt).tokens for name, prompt in prompts.items()}
    old = {name: plain.ask(prompt).tokens for name, prompt in prompts.items()}
    assert all(old[name] != new[name] for name in prompts), "the weights matter"
    return {"old": old, "new": new}


@pytest.fixture
def pool(tmp_path: Path) -> str:
    return f"file://{tmp_path}/pool?size=1GiB"


def stored(node: Node, prompt: list[int]) -> Answer:
    """Asks, and waits until the pool has the prompt."""
    before = node.counters()
    answer = node.ask(prompt)
    all_stored(node, 4, since=before)
    return answer


TWO_RANKS = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


@pytest.mark.parametrize("ranks", [{}, TWO_RANKS], ids=["one rank", "two ranks"])
def test_after_an_update_nothing_of_the_old_weights_is_loaded(
    ranks: dict[str, Any],
    pool: str,
    llama: Path,
    newer: Path,
    right: dict[str, dict[str, tuple[int, ...]]],
    start: Start,
) -> None:
    options = {"pool": pool, "settings": {"penstock.host_tier": True}, **ranks}
    with start(llama, **options) as node:
        assert stored(node, ONE).tokens == right["old"]["one"]
        node.call("reload_weights", weights_path=str(newer))
        assert node.reset(pool=True)
        answer = stored(node, ONE)
        assert (answer.cached, answer.tokens) == (0, right["new"]["one"])
        answer = stored(node, OTHER)
        assert (answer.cached, answer.tokens) == (0, right["new"]["other"])
        # What the new weights have computed is found while they are there.
        node.forget()
        for name, prompt in (("one", ONE), ("other", OTHER)):
            answer = node.ask(prompt)
            assert (answer.cached, answer.tokens) == (FOUND, right["new"][name])
        # And back: these are the weights of the beginning.
        node.call("reload_weights", weights_path=str(llama))
        assert node.reset(pool=True)
        answer = stored(node, OTHER)
        assert (answer.cached, answer.tokens) == (0, right["old"]["other"])
        answer = node.ask(ONE)
        assert (answer.cached, answer.tokens) == (FOUND, right["old"]["one"])
    # The pool of the old weights has what was stored with them, before and after.
    with start(llama, **options) as second:
        for name, prompt in (("one", ONE), ("other", OTHER)):
            answer = second.ask(prompt)
            assert (answer.cached, answer.tokens) == (FOUND, right["old"][name])
        answer = second.ask(THIRD)
        assert (answer.cached, answer.tokens) == (0, right["old"]["third"])


def test_without_a_reset_nothing_of_both_weights_is_stored(
    pool: str,
    llama: Path,
    newer: Path,
    right: dict[str, dict[str, tuple[int, ...]]],
    start: Start,
) -> None:
    with start(llama, pool=pool) as node:
        stored(node, ONE)
        stored(node, OTHER)
        node.forget()
        node.ask(OTHER)
        node.call("reload_weights", weights_path=str(newer))
        # What the pool has is of the old weights.
        answer = stored(node, ONE)
        assert (answer.cached, answer.tokens) == (0, right["new"]["one"])
        before = node.counters()
        # The first blocks are in the engine's own cache. It is not known whose they are.
        node.ask([*ONE[: 2 * BLOCK], *THIRD])
        # And here all that could be loaded is.
        node.ask(OTHER, BLOCK + 10)
        assert node.counters()["stored_blocks"] == before["stored_blocks"]
        node.forget()
        answer = stored(node, THIRD)
        assert (answer.cached, answer.tokens) == (0, right["new"]["third"])
        answer = node.ask(OTHER)
        assert (answer.cached, answer.tokens) == (0, right["new"]["other"])


def test_what_somebody_else_does_to_weights_is_noticed(
    pool: str, llama: Path, start: Start
) -> None:
    with start(llama, pool=pool, worker_extension_cls=EXTENSION) as node:
        before = stored(node, ONE)
        node.forget()
        assert node.call("look")[0] > 0
        hit = node.ask(ONE)
        assert hit.cached == FOUND, "nothing has changed"
        node.call("train")
        assert node.reset(pool=True)
        answer = stored(node, ONE)
        assert answer.cached == 0
        assert answer.text != before.text
    with start(llama, pool=pool) as second:
        answer = second.ask(ONE)
        # As its own hit was: some CPUs round a whole prompt otherwise than its end.
        assert (answer.cached, answer.text) == (FOUND, hit.text)


def test_while_an_engine_sleeps_nothing_is_moved_and_then_all_is_as_before(
    pool: str, llama: Path, newer: Path, start: Start
) -> None:
    with start(llama, pool=pool, **LIVE) as node:
        right = stored(node, ONE)
        for _ in range(2):
            node.forget()
            # As each part of vLLM may say so.
            node.call("fall_asleep")
            node.call("fall_asleep")
            before = node.counters()
            for prompt in (ONE, OTHER):
                answer = node.ask(prompt)
                assert answer.cached == 0
            assert answer.tokens
            node.call("rise")
            node.call("rise")
            node.forget()
            after = node.counters()
            assert after["stored_blocks"] == before["stored_blocks"]
            answer = node.ask(ONE)
            assert (answer.cached, answer.tokens) == (FOUND, right.tokens)
        # Weights that change while it sleeps are seen when it is awake.
        node.call("fall_asleep")
        node.call("reload_weights", weights_path=str(newer))
        node.call("rise")
        node.forget()
        answer = stored(node, ONE)
        assert answer.cached == 0
        assert answer.tokens != right.tokens


def test_updates_under_load(
    pool: str,
    llama: Path,
    newer: Path,
    right: dict[str, dict[str, tuple[int, ...]]],
    start: Start,
) -> None:
    draws = random.Random(3)
    prompts = [tokens(3 * BLOCK + 20 * number, seed=60 + number) for number in range(6)]
    with start(llama, pool=pool, settings={"penstock.host_tier": True}) as node:
        for turn in range(6):
            asked = [node.start(prompt, 24) for prompt in prompts]
            for prompt in draws.sample(prompts, 3):
                node.ask(prompt, 2)
            weights = ("new", newer) if turn % 2 == 0 else ("old", llama)
            node.call("reload_weights", weights_path=str(weights[1]))
            for number in asked:
                node.answer(number)
            assert node.reset(pool=True)
            for name, prompt in (("one", ONE), ("other", OTHER), ("third", THIRD)):
                assert node.ask(prompt).tokens == right[weights[0]][name]
    with start(llama, pool=pool) as second, start(llama) as alone:
        for prompt in prompts:
            assert second.ask(prompt, 24).tokens == alone.ask(prompt, 24).tokens
