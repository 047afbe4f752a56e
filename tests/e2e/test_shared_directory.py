"""A pool in a directory that is mounted twice, as if by two hosts, on the real vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.node import SHORT_LIMITS, Node
from tests.mounts import Mount, needs_mounts

pytestmark = [pytest.mark.e2e, needs_mounts]

PROMPTS = [tokens(6 * BLOCK + 30, seed=370 + number) for number in range(3)]


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
        loaded = [second.ask(prompt) for prompt in PROMPTS]
        assert [answer.text for answer in loaded] == [answer.text for answer in own]
        assert second.counters()["loaded_tokens"] == 6 * len(PROMPTS) * BLOCK

        second.forget()
        b.freeze()
        try:
            began = time.monotonic()
            computed = [second.ask(prompt) for prompt in PROMPTS]
            assert time.monotonic() - began < 60
        finally:
            b.thaw()
        assert [answer.tokens for answer in computed] == [answer.tokens for answer in own]
        assert [answer.cached for answer in computed] == [0] * len(PROMPTS)

        end = time.monotonic() + 60
        while second.ask(PROMPTS[0]).cached != 6 * BLOCK:
            assert time.monotonic() < end, second.counters()
            second.forget()
            time.sleep(0.5)
