"""vLLM 0.30 and 0.31."""

from __future__ import annotations

from typing import Any

from penstock.vllm.compat.uses import Use
from penstock.vllm.compat.vllm_0_29 import BLOCK_SIZES, Vllm029

SINCE = (
    *(
        Use(
            "vllm.distributed.kv_transfer.kv_connector.v1.base",
            f"KVConnectorTransferResults.{name}",
        )
        for name in ("finished_sending", "finished_recving", "failed_recving")
    ),
    Use("vllm.config", "VllmConfig._resolve_mm_embedding_inputs", (), is_wrapped=True),
    Use("vllm.v1.core.sched.output", "KVConnectorBlockState.resolve_block_ids"),
    Use("vllm.v1.kv_cache_interface", "KVCacheConfig.prefix_cacheable_group_ids"),
    Use("vllm.v1.kv_cache_interface", "KVCacheSpec.has_layer_views"),
)
"""What Penstock uses of vLLM since this version."""


class Vllm030(Vllm029):
    """What differs in 0.30 and 0.31: the scheduler does by itself what 0.29's was made to do."""

    USES = (*Vllm029.PLANNING.uses, *SINCE, BLOCK_SIZES)

    UNASKED = ()

    def prefix_cacheable_groups(self, kv_cache_config: Any) -> tuple[int, ...]:
        """Numbers of the KV-cache groups that vLLM finds by prefix."""
        return tuple(kv_cache_config.prefix_cacheable_group_ids)

    def has_layer_views(self, spec: Any) -> bool:
        """Whether vLLM makes a view of the KV cache for each layer of this kind."""
        return bool(spec.has_layer_views)

    def adapt_scheduler(self) -> None:
        """Does nothing: this version's scheduler does all that is needed."""
