"""Node memory: one host tier for all engines of a machine."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Answer, Node
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.test_parallel import TOPOLOGIES
from tests.servers import Server

pytestmark = pytest.mark.e2e

BLOCKS = 4
PROMPTS = [tokens(BLOCKS * BLOCK + 7, seed=900 + i) for i in range(4)]


@pytest.fixture
def memory() -> Iterator[dict[str, Any]]:
    """The settings of engines that share node memory."""
    name = f"test-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        stack.callback(Path(f"/dev/shm/penstock-{name}").unlink, missing_ok=True)
        yield {"penstock.host_memory": f"shm://{name}?size=64MiB"}


def hits(node: Node) -> list[Any]:
    """The engine's own prefix-cache hits, to compare with."""
    for prompt in PROMPTS:
        node.ask(prompt)
    return [node.ask(prompt).text for prompt in PROMPTS]


def assert_hits(answers: list[Answer], expected: list[Any]) -> None:
    """All blocks that can be loaded were, and the answers are those of own hits."""
    assert [answer.cached for answer in answers] == [BLOCKS * BLOCK] * len(PROMPTS)
    assert [answer.text for answer in answers] == expected


def test_what_one_engine_computed_another_loads_without_a_pool(
    llama: Path,
    plain: Node,
    start: Callable[..., Node],
    memory: dict[str, Any],
    tmp_path: Path,
) -> None:
    expected = hits(plain)
    with Server("valkey", tmp_path) as server:
        with start(llama, pool=server.unix_url, settings=memory) as first:
            for prompt in PROMPTS:
                first.ask(prompt)
            first.wait_for("stored_blocks", BLOCKS * len(PROMPTS))
        with start(llama, pool=server.unix_url, settings=memory) as second:
            server.kill()
            assert_hits([second.ask(prompt) for prompt in PROMPTS], expected)
            counters = second.counters()
            assert counters["kept_bytes"] > 0
            assert counters.get("loaded_bytes", 0) == 0
            assert counters.get("lookups", 0) == 0, "the pool was not even asked"


def test_what_comes_from_the_pool_is_there_for_the_others(
    llama: Path,
    plain: Node,
    start: Callable[..., Node],
    memory: dict[str, Any],
    tmp_path: Path,
) -> None:
    expected = hits(plain)
    pool, empty = (f"file://{tmp_path}/{name}?size=1GiB" for name in ("pool", "empty"))
    with start(llama, pool=pool) as writer:
        for prompt in PROMPTS:
            writer.ask(prompt)
        writer.wait_for("stored_blocks", BLOCKS * len(PROMPTS))
    for url, tier in ((pool, "loaded_bytes"), (empty, "kept_bytes")):
        with start(llama, pool=url, settings=memory) as reader:
            assert_hits([reader.ask(prompt) for prompt in PROMPTS], expected)
            bytes_of = {
                name: reader.counters().get(name, 0) for name in ("loaded_bytes", "kept_bytes")
            }
            assert [name for name, count in bytes_of.items() if count] == [tier], bytes_of


@pytest.mark.parametrize("topology", ["tp2", pytest.param("pp3-1", marks=pytest.mark.full)])
def test_every_rank_takes_its_part_from_there(
    topology: str,
    llama: Path,
    start: Callable[..., Node],
    memory: dict[str, Any],
    tmp_path: Path,
) -> None:
    engine_args, env = TOPOLOGIES[topology]
    options: dict[str, Any] = {
        "distributed_executor_backend": "mp",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} | env,
    } | engine_args
    pools = (f"file://{tmp_path}/{name}?size=1GiB" for name in ("first", "second"))
    said = []
    for pool in pools:
        with start(llama, pool=pool, settings=memory, **options) as node:
            answers = [node.ask(prompt) for prompt in PROMPTS]
            said.append([answer.tokens for answer in answers])
            cached = {answer.cached for answer in answers}
            if len(said) == 1:
                node.wait_for("stored_blocks", BLOCKS * len(PROMPTS))
            else:
                assert cached == {BLOCKS * BLOCK}
                assert node.counters().get("loaded_bytes", 0) == 0
    assert said[0] == said[1]
