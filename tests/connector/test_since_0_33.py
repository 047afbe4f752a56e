"""What vLLM does since 0.33 only, with vLLM's own code. Other versions skip these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version
from vllm.config import cache
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from penstock.errors import ConfigError
from penstock.vllm import compat
from penstock.vllm.compat.versions import installed
from penstock.vllm.connector import Report
from penstock.vllm.messages import WorkerReport
from tests.connector.test_compat import UNIFORM, caches, engine

pytestmark = pytest.mark.skipif(
    Version(vllm.__version__) < Version("0.33"), reason="vLLM does this since 0.33"
)


def output(**found: Any) -> ModelRunnerOutput:
    """What a rank answers after a step."""
    report = Report(WorkerReport(**found))
    return ModelRunnerOutput(
        req_ids=[],
        req_id_to_index={},
        kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=report),
    )


def test_what_ranks_of_a_failed_step_reported_counts_once() -> None:
    aggregator = KVOutputAggregator(2)
    failed = [output(released={1: 1}, held=b"a"), output(released={1: 1})]
    aggregator.ft_defer_kv_connector_outputs([each.kv_connector_output for each in failed])

    def reported(*ranks: ModelRunnerOutput) -> WorkerReport:
        whole = aggregator.aggregate(list(ranks))
        assert whole is not None
        found: Report = whole.kv_connector_output.kv_connector_worker_meta
        return found.report

    both = reported(output(stored={1: 1}, held=b"b"), output(stored={1: 1}))
    assert both == WorkerReport(released={1: 2}, stored={1: 2}, held=b"ab")
    assert reported(output(stored={2: 1}), output()) == WorkerReport(stored={2: 1})


@pytest.mark.parametrize("mode", ["CUSTOM", "FP8_PER_TENSOR", "NONE"])
def test_types_that_plug_ins_bring_are_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_KV_CACHE_DTYPE_HANDLERS", {})
    monkeypatch.setattr(cache, "KV_CACHE_DTYPES", list(cache.KV_CACHE_DTYPES))
    monkeypatch.setattr(cache, "STR_DTYPE_TO_TORCH_DTYPE", {})
    compat.transfer_groups(engine(kv_type="mine"), caches(*UNIFORM))

    @cache.register_kv_cache_dtype("mine")
    class Handler:
        name = "mine"

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> KVQuantMode:
            return KVQuantMode[mode]

    with pytest.raises(ConfigError, match="KV of the type mine, which a plug-in has brought"):
        compat.transfer_groups(engine(kv_type="mine"), caches(*UNIFORM))
    compat.transfer_groups(engine(), caches(*UNIFORM))


def test_a_platform_says_what_a_block_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    name = f"{__name__}.Twice"
    monkeypatch.setattr(
        type(current_platform), "get_kv_cache_config_builder_cls", lambda *given: name
    )
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    stages = [{"model.layers.0.attn": spec, "model.layers.1.attn": spec}, {}]
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(supports_kv_cache_grouping=False),
        num_prefill_lookahead_tokens=0,
        speculative_config=None,
    )
    assert compat.block_bytes(config, stages) == [4242, 0]


class Twice:
    """A platform's builder, which has a group for each layer."""

    def get_kv_cache_groups(self, vllm_config: Any, specs: dict[str, Any]) -> list[Any]:
        from vllm.v1.kv_cache_interface import KVCacheGroupSpec

        return [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]

    def _get_pool_bytes_per_block(self, vllm_config: Any, groups: list[Any]) -> int:
        assert [group.layer_names for group in groups] == [
            ["model.layers.0.attn"],
            ["model.layers.1.attn"],
        ]
        return 4242


def test_hashes_do_not_look_ahead_beside_a_connector() -> None:
    """Drafters would find a block more. Then blocks would have other names."""
    from vllm.config import VllmConfig

    ahead = VllmConfig.num_hash_lookahead_tokens.fget
    assert ahead is not None
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            use_eagle_block_drop=lambda: True, disable_lookahead_block_hashes=False
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        num_prefill_lookahead_tokens=1,
        kv_transfer_config=None,
    )
    assert ahead(config) == 1
    config.kv_transfer_config = SimpleNamespace(kv_connector="PenstockConnector")
    assert ahead(config) == 0


def test_the_newest_class_is_that_of_this_version() -> None:
    assert type(installed()).__name__ == "Vllm033"
