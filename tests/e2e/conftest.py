"""Fixtures of the end-to-end tests: models, pools, and engines that live as long as a module."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.engines.forks import Fork
from lab.engines.node import Node
from lab.models import attention
from lab.models.saved import VOCABULARY
from tests.e2e.engines import Engines
from tests.servers import Server

# Engines' processes import these. Pytest would, to look for examples in them, and vLLM with them.
collect_ignore = [f"{name}.py" for name in ("async_on_cpu", "exchange", "mla_on_cpu", "preloaded")]

BLOCK = 128
"""vLLM's default block size on CPU."""


KV_BYTES_PER_BLOCK = 4 * 2 * 2 * 32 * 4 * BLOCK
"""Of the test model: layers, K and V, KV heads, head size, bytes of float32, tokens."""


def tokens(count: int, seed: int) -> list[int]:
    """A prompt of so many random tokens, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with grouped-query attention."""
    return attention.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The engines of this run."""
    engines = Engines(tmp_path_factory.mktemp("nodes"))
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def start(engines: Engines) -> Iterator[Callable[..., Node]]:
    """Gets engines; all that were not left yet are left with the module."""
    nodes: list[Node] = []

    def get(model: Path, **options: Any) -> Node:
        nodes.append(engines.get(model, **options))
        return nodes[-1]

    yield get
    for node in nodes:
        if not engines.has(node):
            node.leave()


@pytest.fixture(scope="session")
def plain(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """vLLM alone: the reference."""
    with Node(llama, tmp_path_factory.mktemp("plain") / "node.log", launch=Fork) as node:
        yield node


OTHER_POOLS = [
    pytest.param(name, marks=pytest.mark.full) for name in ("shm-file", "redis-tcp", "redis-unix")
]


@pytest.fixture(params=["file", "shm", "valkey-unix", *OTHER_POOLS])
def any_pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty pool of every kind."""
    file = f"file://{tmp_path}/pool?size=1GiB"
    if request.param == "file":
        yield file
        return
    if request.param.startswith("shm"):
        name = f"test-{uuid.uuid4().hex}"
        shm = f"shm://{name}?size=256MiB"
        try:
            yield shm if request.param == "shm" else f"{shm} {file}"
        finally:
            Path(f"/dev/shm/penstock-{name}").unlink(missing_ok=True)
        return
    kind, transport = request.param.split("-")
    with Server(kind, tmp_path) as server:
        yield server.tcp_url if transport == "tcp" else server.unix_url
