"""A pool in an object store: what one engine stored another loads, and faults cost hits alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from lab.engines.node import Answer, Node
from lab.objects import Gate
from lab.waiting import eventually
from tests.e2e.conftest import BLOCK, tokens
from tests.servers import ObjectServer

pytestmark = pytest.mark.e2e

BLOCKS = 8
PROMPTS = [tokens(BLOCKS * BLOCK + 30, seed=3400 + i) for i in range(3)]
LOADED = len(PROMPTS) * BLOCKS * BLOCK
LIMITS = {"penstock.lookup_timeout": 5.0, "penstock.load_timeout": 20.0}
"""How long each failure is waited for. A first listing takes some requests."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with ObjectServer(tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.fixture(scope="module")
def expected(plain: Node) -> list[Answer]:
    """For each prompt vLLM's own prefix-cache hit."""
    for prompt in PROMPTS:
        plain.ask(prompt)
    return [plain.ask(prompt) for prompt in PROMPTS]


def ask_all(node: Node, expected: list[Answer]) -> int:
    """Asks every prompt anew; all answers must be right. How many tokens were hits."""
    node.forget()
    answers = [node.ask(prompt) for prompt in PROMPTS]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    return sum(answer.cached for answer in answers)


def wait_for_hits(node: Node, expected: list[Answer]) -> None:
    eventually(lambda: ask_all(node, expected) >= LOADED, node.counters, pause=0.2)


def test_another_engine_loads_and_faults_cost_hits_alone(
    server: ObjectServer, llama: Path, expected: list[Answer], start: Callable[..., Node]
) -> None:
    with start(llama, pool=server.url("shared/kv")) as first:
        ask_all(first, expected)
        first.wait_for("stored_blocks", len(PROMPTS) * BLOCKS)

    with (
        Gate(server) as gate,
        start(
            llama,
            pool=server.url("shared/kv", "&fresh=100ms", gate.port),
            settings=LIMITS,
        ) as second,
    ):
        wait_for_hits(second, expected)
        assert second.counters()["loaded_tokens"] >= LOADED
        assert second.counters().get("load_failed_blocks", 0) == 0
        assert second.counters().get("stored_bytes", 0) == 0, "all of it is there"
        for refusal in ((503, "SlowDown"), (404, "NoSuchBucket"), (403, "AccessDenied")):
            gate.refusal = refusal
            ask_all(second, expected)
        assert gate.refused > 0
        gate.refusal = None
        wait_for_hits(second, expected)


def objects(pool: penstock.Pool) -> int:
    """How many objects a pool has of the namespace that has most: the engine's."""
    return max((each.objects for each in pool.namespaces()), default=0)


@pytest.mark.soak
def test_behind_shared_memory_it_is_read_once(
    server: ObjectServer, llama: Path, expected: list[Answer], start: Callable[..., Node]
) -> None:
    with start(llama, pool=server.url("far")) as first:
        ask_all(first, expected)
        first.wait_for("stored_blocks", len(PROMPTS) * BLOCKS)
    name = f"test-{uuid.uuid4().hex}"
    try:
        with (
            Gate(server) as gate,
            start(
                llama,
                pool=f"shm://{name}?size=256MiB {server.url('far', port=gate.port)}",
                settings=LIMITS,
            ) as node,
        ):
            wait_for_hits(node, expected)
            with penstock.open(f"shm://{name}?size=256MiB") as near:
                # Promotions are beside the work.
                eventually(lambda: objects(near) >= len(PROMPTS) * BLOCKS, near.namespaces)
            gate.refusal = (503, "SlowDown")
            wait_for_hits(node, expected)
    finally:
        Path(f"/dev/shm/penstock-{name}").unlink(missing_ok=True)
