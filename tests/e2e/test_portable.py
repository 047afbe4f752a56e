"""Portable objects: what an engine of one topology wrote, engines of others load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Node
from lab.models import attention
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.test_parallel import TOPOLOGIES

pytestmark = pytest.mark.e2e

# An object has two layers: so stages are of whole objects.
STAGES = {
    "pp6-2": (TOPOLOGIES["pp3-1"][0], {"VLLM_PP_LAYER_PARTITION": "6,2"}),
    "pp4-4": TOPOLOGIES["pp2-2"],
    "tp2": TOPOLOGIES["tp2"],
    "single": ({}, {}),
}

CHAIN: list[tuple[str, str]] = [
    ("pp6-2", "BLHNC"),
    ("single", "LBHNC"),
    ("tp2", "BLHNC"),
    ("pp4-4", "BLHNC"),
    ("pp6-2", "LBHNC"),
]
"""Topology and layout of each engine; each writes a prompt of its own for those after it."""


def test_every_topology_reads_every_other(start: Callable[..., Node], tmp_path: Path) -> None:
    deep = attention.llama(tmp_path / "deep", layers=8)
    prompts = [tokens(3 * BLOCK + 9 * i, seed=70 + i) for i in range(1, 1 + len(CHAIN))]
    with start(deep) as plain:
        expected = [plain.ask(prompt).tokens for prompt in prompts]
    for number, (topology, layout) in enumerate(CHAIN):
        engine_args, env = STAGES[topology]
        binding = "0" if topology == "single" else "0|1"
        options: dict[str, Any] = {
            "pool": f"file://{tmp_path}/pool?size=1GiB",
            "settings": {"penstock.pool_geometry": "portable", "penstock.kv_layout": layout},
            "env": env | {"VLLM_CPU_OMP_THREADS_BIND": binding},
            "distributed_executor_backend": "mp",
        } | engine_args
        with start(deep, **options) as node:
            for known in range(number):
                answer = node.ask(prompts[known])
                assert answer.cached == 3 * BLOCK, f"{topology} does not find prompt {known}"
                assert answer.tokens == expected[known]
            assert node.counters().get("loaded_tokens", 0) == number * 3 * BLOCK
            own = node.ask(prompts[number])
            assert (own.cached, own.tokens) == (0, expected[number])
            node.wait_for("stored_blocks", 3)
