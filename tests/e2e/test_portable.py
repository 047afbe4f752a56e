"""Portable objects: what an engine of one topology wrote, engines of others load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.node import Node
from tests.e2e.test_parallel import TOPOLOGIES

pytestmark = pytest.mark.e2e

CHAIN: list[tuple[str, str]] = [
    ("pp3-1", "BLHNC"),
    ("single", "LBHNC"),
    ("tp2", "BLHNC"),
    ("pp2-2", "BLHNC"),
    ("pp3-1", "LBHNC"),
]
"""Topology and layout of each engine; each writes a prompt of its own for those after it."""


def test_every_topology_reads_every_other(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    prompts = [tokens(3 * BLOCK + 9 * i, seed=70 + i) for i in range(1, 1 + len(CHAIN))]
    expected = [plain.ask(prompt).tokens for prompt in prompts]
    for number, (topology, layout) in enumerate(CHAIN):
        engine_args, env = TOPOLOGIES.get(topology, ({}, {}))
        binding = "0" if topology == "single" else "0|1"
        options: dict[str, Any] = {
            "pool": f"file://{tmp_path}/pool?size=1GiB",
            "settings": {"penstock.pool_geometry": "portable", "penstock.kv_layout": layout},
            "env": env | {"VLLM_CPU_OMP_THREADS_BIND": binding},
            "distributed_executor_backend": "mp",
        } | engine_args
        with start(llama, **options) as node:
            for known in range(number):
                answer = node.ask(prompts[known])
                assert answer.cached == 3 * BLOCK, f"{topology} does not find prompt {known}"
                assert answer.tokens == expected[known]
            assert node.counters().get("loaded_tokens", 0) == number * 3 * BLOCK
            own = node.ask(prompts[number])
            assert (own.cached, own.tokens) == (0, expected[number])
            node.wait_for("stored_blocks", 3)
