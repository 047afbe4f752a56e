"""vLLM 0.32."""

from __future__ import annotations

from typing import Any

from penstock.vllm.compat.planning import Planning
from penstock.vllm.compat.uses import Use
from penstock.vllm.compat.vllm_0_30 import Vllm030

HASH_BLOCK_SIZE = Use("vllm.v1.kv_cache_interface", "KVCacheConfig.hash_block_size")

SINCE = (
    HASH_BLOCK_SIZE,
    Use("vllm.v1.metrics.cache_hit_source", "CacheHitSource"),
    *(
        Use("vllm.config.speculative", f"SpeculativeConfig.{name}", ())
        for name in ("use_eagle_block_drop", "use_multi_module_mtp")
    ),
    *(
        Use("vllm.config.speculative", f"SpeculativeConfig.{name}")
        for name in ("draft_model_config", "draft_tensor_parallel_size", "parallel_drafting")
    ),
    Use("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs.kv_cache_specs"),
    Use("vllm.v1.request", "Request.kv_hints"),
    Use("vllm.v1.kv_hints.protocol", "KvHintsEnvelope.actions"),
    *(
        Use("vllm.v1.kv_hints.protocol", f"KvHintAction.{name}")
        for name in ("action_type", "action_version", "payload")
    ),
)
"""What Penstock uses of vLLM since this version."""


class Vllm032(Vllm030):
    """What differs in 0.32: hashes have a block size of their own, and drafters were tried."""

    PLANNING = Planning(
        "vllm.v1.core.kv_cache_utils",
        pool_bytes_takes=("vllm_config", "kv_cache_groups"),
    )

    USES = (*PLANNING.uses, *SINCE)

    NAMES_SESSIONS_ANEW = True

    CARRIES_DRAFTS = True

    def hash_block_size(self, vllm_config: Any, kv_cache_config: Any) -> int | None:
        """Tokens of the blocks that hashes are computed over; None for the only group's block
        size."""
        found: int | None = kv_cache_config.hash_block_size
        return found
