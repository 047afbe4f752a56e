"""How an engine ends in vLLM's own order. Nearly all other tests kill theirs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lab.engines.node import ANSWER_TIMEOUT, Node
from lab.waiting import eventually
from tests.e2e.conftest import BLOCK, tokens

pytestmark = pytest.mark.e2e

PROMPT = tokens(6 * BLOCK + 30, seed=4_711)


def processes_of(node: Node) -> list[int]:
    """The processes of an engine, those that it started too. Ended ones do not count, though
    nobody may have collected them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            is_over = process.status() == psutil.STATUS_ZOMBIE
            if os.getpgid(process.pid) == node.process.pid and not is_over:
                found.append(process.pid)
    return found


@pytest.mark.parametrize("any_pool", ["shm-file", "redis-tcp"], indirect=True)
def test_an_engine_leaves_whole_values_and_no_process(
    llama: Path, plain: Node, start: Callable[..., Node], any_pool: str
) -> None:
    expected = plain.ask(PROMPT)
    first = start(llama, pool=any_pool)
    assert first.ask(PROMPT).tokens == expected.tokens
    # Its stores may be under way still.
    assert first.process.stdin is not None
    first.process.stdin.close()
    assert first.process.wait(ANSWER_TIMEOUT) == 0
    eventually(lambda: not processes_of(first))
    first.kill()
    assert "Traceback" not in first.log.read_text()
    with start(llama, pool=any_pool) as second:
        assert second.ask(PROMPT).tokens == expected.tokens
        assert second.counters().get("load_failed_blocks", 0) == 0
