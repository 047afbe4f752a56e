"""Tensor- and pipeline-parallel ranks write and find their own parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Node
from tests.e2e.conftest import BLOCK, tokens

pytestmark = pytest.mark.e2e

# vLLM 0.32 needs compilation, hence no enforce_eager, for pipelines on CPU. PyTorch's own way to
# compile takes a third of the time to start that vLLM's takes.
QUICKLY_COMPILED: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 1}}
_PIPELINE = {"pipeline_parallel_size": 2, **QUICKLY_COMPILED}

TOPOLOGIES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "tp2": ({"tensor_parallel_size": 2}, {}),
    # As vLLM compiles by default.
    "pp2-2": (_PIPELINE | {"compilation_config": {}}, {}),
    "pp3-1": (_PIPELINE, {"VLLM_PP_LAYER_PARTITION": "3,1"}),
    "tp2-pp2": (
        _PIPELINE | {"tensor_parallel_size": 2},
        {"VLLM_CPU_OMP_THREADS_BIND": "0|1|0|1"},
    ),
}


# Four ranks take minutes on two cores.
FOUR_RANKS = pytest.param("tp2-pp2", marks=pytest.mark.soak)
SLOWLY_COMPILED = pytest.param("pp2-2", marks=pytest.mark.full)


@pytest.mark.parametrize("topology", ["tp2", "pp3-1", SLOWLY_COMPILED, FOUR_RANKS])
def test_ranks_find_their_parts(
    topology: str, llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    engine_args, env = TOPOLOGIES[topology]
    options: dict[str, Any] = {
        "pool": f"file://{tmp_path}/pool?size=1GiB",
        "distributed_executor_backend": "mp",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} | env,
    } | engine_args
    prompts = [tokens(length, seed=length) for length in (5 * BLOCK + 3, 4 * BLOCK)]
    with start(llama, **options) as first:
        cold = [first.ask(prompt) for prompt in prompts]
        own_hits = [first.ask(prompt) for prompt in prompts]
        assert first.counters().get("loaded_tokens", 0) == 0
        first.wait_for("stored_blocks", 9)
    with start(llama, **options) as second:
        answers = [second.ask(prompt) for prompt in prompts]
        assert [a.cached for a in answers] == [5 * BLOCK, 3 * BLOCK]
        assert [a.text for a in answers] == [a.text for a in own_hits]
        assert [a.tokens for a in answers] == [a.tokens for a in cold]
        assert second.counters()["loaded_tokens"] == 8 * BLOCK
