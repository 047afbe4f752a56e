"""How an engine ends in vLLM's own order. Nearly all other tests kill theirs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.node import Node

pytestmark = pytest.mark.e2e

PROMPT = tokens(6 * BLOCK + 30, seed=4_711)


@pytest.mark.parametrize("any_pool", ["shm-file", "redis-tcp"], indirect=True)
def test_an_engine_leaves_whole_values_and_no_process(
    llama: Path, plain: Node, start: Callable[..., Node], any_pool: str
) -> None:
    expected = plain.ask(PROMPT)
    first = start(llama, pool=any_pool)
    assert first.ask(PROMPT).tokens == expected.tokens
    # Its stores may be under way still.
    assert first.stop() == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(first.process.pid, 0)
    assert "Traceback" not in first.log.read_text()
    with start(llama, pool=any_pool) as second:
        assert second.ask(PROMPT).tokens == expected.tokens
        assert second.counters().get("load_failed_blocks", 0) == 0
