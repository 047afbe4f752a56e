"""A pool in a directory that is mounted twice, as if by two hosts, on the real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engines.node import SHORT_LIMITS, Answer, Node
from lab.waiting import eventually
from tests.e2e.conftest import BLOCK, tokens
from tests.mounts import Mount, needs_mounts

pytestmark = [pytest.mark.e2e, needs_mounts]

PROMPTS = [tokens(6 * BLOCK + 30, seed=370 + number) for number in range(3)]


def hit(node: Node, prompt: list[int]) -> Answer:
    """Asks until the whole prompt is loaded: a busy machine may need longer than the limits."""
    answers: list[Answer] = []

    def is_loaded() -> bool:
        node.forget()
        answers.append(node.ask(prompt))
        return answers[-1].cached == 6 * BLOCK

    eventually(is_loaded)
    return answers[-1]


def test_hosts_share_and_a_server_that_hangs_costs_hits(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    settings = {"penstock.host_tier": "false"}
    with (
        Mount(shared, tmp_path / "a") as a,
        Mount(shared, tmp_path / "b") as b,
        start(llama, settings=settings, pool=f"file://{a.path}/pool?size=1GiB") as first,
        start(
            llama, settings=settings | SHORT_LIMITS, pool=f"file://{b.path}/pool?size=1GiB"
        ) as second,
    ):
        for prompt in PROMPTS:
            first.ask(prompt)
        own = [first.ask(prompt) for prompt in PROMPTS]
        first.wait_for("stored_blocks", 6 * len(PROMPTS))
        loaded = [hit(second, prompt) for prompt in PROMPTS]
        assert [answer.text for answer in loaded] == [answer.text for answer in own]
        assert second.counters()["loaded_tokens"] >= 6 * len(PROMPTS) * BLOCK

        second.forget()
        b.freeze()
        try:
            # An engine that waited for the server would wait until the answer's time limit.
            computed = [second.ask(prompt) for prompt in PROMPTS]
        finally:
            b.thaw()
        assert [answer.tokens for answer in computed] == [answer.tokens for answer in own]
        assert [answer.cached for answer in computed] == [0] * len(PROMPTS)
        assert hit(second, PROMPTS[0]).text == own[0].text
