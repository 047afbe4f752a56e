"""Engines that differ in anything that matters never see each other's blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.engines.node import Node, StartError
from lab.models import attention
from tests.e2e.conftest import BLOCK, tokens

pytestmark = pytest.mark.e2e

PROMPT = tokens(4 * BLOCK + 5, seed=5)


@pytest.fixture(scope="module")
def filled_pool(
    llama: Path, start: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory
) -> str:
    pool = f"file://{tmp_path_factory.mktemp('pool')}?size=1GiB"
    with start(llama, pool=pool) as node:
        node.ask(PROMPT)
        node.wait_for("stored_blocks", 4)
    return pool


def test_the_same_engine_hits(filled_pool: str, llama: Path, start: Callable[..., Node]) -> None:
    with start(llama, pool=filled_pool) as node:
        assert node.ask(PROMPT).cached == 4 * BLOCK


@pytest.mark.parametrize(
    ("model_options", "engine_args"),
    [
        pytest.param({"seed": 1}, {}, id="weights"),
        pytest.param({"heads": 2}, {}, id="model"),
        pytest.param({}, {"dtype": "bfloat16"}, id="dtype"),
        pytest.param({}, {"block_size": 64}, id="block-size"),
    ],
)
def test_another_engine_never_hits(
    filled_pool: str,
    model_options: dict[str, Any],
    engine_args: dict[str, Any],
    start: Callable[..., Node],
    tmp_path: Path,
) -> None:
    model = attention.llama(tmp_path / "model", **model_options)
    with start(model, pool=filled_pool, **engine_args) as node:
        answer = node.ask(PROMPT)
        counters = node.counters()
        assert answer.cached == 0
        assert counters["lookups"] >= 1
        assert counters.get("lookup_hit_blocks", 0) == 0


def test_what_is_not_supported_is_refused_in_words() -> None:
    import torch
    from vllm.v1 import kv_cache_interface
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    from penstock.errors import ConfigError
    from penstock.vllm import compat

    def refused(spec: Any, message: str) -> None:
        names = getattr(spec, "kv_cache_specs", ("model.layers.0.mixer",))
        config = KVCacheConfig(
            num_blocks=8,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(list(names), spec)],
        )
        with pytest.raises(ConfigError, match=message):
            compat.transfer_groups(SimpleNamespace(speculative_config=None), config)

    state: dict[str, Any] = {
        "block_size": BLOCK,
        "shapes": ((4, 16),),
        "dtypes": (torch.float32,),
    }
    refused(MambaSpec(**state), r"none to go on from: switch its prefix cache on")
    refused(
        MambaSpec(**state, mamba_cache_mode="align", num_speculative_blocks=2),
        r"speculative decoding moves it between blocks",
    )
    heads: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    chunked = kv_cache_interface.ChunkedLocalAttentionSpec(
        block_size=BLOCK, **heads, attention_chunk_size=256
    )
    refused(chunked, r"kind ChunkedLocalAttentionSpec; full attention .* are supported")
    crossed = kv_cache_interface.CrossAttentionSpec(block_size=BLOCK, **heads)
    refused(crossed, r"kind CrossAttentionSpec; ")
    sinks = kv_cache_interface.SinkFullAttentionSpec(block_size=BLOCK, **heads, sink_len=4)
    refused(sinks, r"kind SinkFullAttentionSpec; ")
    latent = kv_cache_interface.MLAAttentionSpec(block_size=BLOCK, **heads | {"num_kv_heads": 1})
    # As vLLM shows it to workers, which have both in one group.
    role = kv_cache_interface.SparseCacheRole.INDEXER
    index = dataclasses.replace(latent, head_size=128, cache_role=role)
    specs = {"model.layers.0.mixer": latent, "model.layers.1.mixer": index}
    sparse = kv_cache_interface.UniformTypeKVCacheSpecs.from_specs(specs)
    refused(sparse, r"indexes of sparse attention\. .* without Penstock")

    class Newer(kv_cache_interface.FullAttentionSpec):  # type: ignore[misc]
        """What a later vLLM may keep beside KV."""

    refused(Newer(block_size=BLOCK, **heads), r"of the kind Newer; ")


def test_a_hybrid_model_in_one_group(start: Callable[..., Node], tmp_path: Path) -> None:
    model = attention.gemma2(tmp_path / "model")
    pool = f"file://{tmp_path}/pool?size=256MiB"
    with start(model, pool=pool, disable_hybrid_kv_cache_manager=True) as node:
        cold, own_hit = node.ask(PROMPT), node.ask(PROMPT)
        node.wait_for("stored_blocks", 4)
        node.forget()
        loaded = node.ask(PROMPT)
        assert loaded.cached == own_hit.cached == 4 * BLOCK
        assert loaded.text == own_hit.text
        assert loaded.tokens == cold.tokens
        assert node.counters()["loaded_tokens"] == 4 * BLOCK


def test_another_failure_policy_is_refused(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    with pytest.raises(StartError, match="kv_load_failure_policy"):
        start(
            llama,
            kv_transfer_config={
                "kv_connector": "PenstockConnector",
                "kv_connector_module_path": "penstock.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"penstock.pool": f"file://{tmp_path}/pool"},
            },
        )
