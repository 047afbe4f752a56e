"""vLLM 0.33: the planning of KV memory is a module of its own."""

from __future__ import annotations

from penstock.vllm.compat import vllm_0_30, vllm_0_32
from penstock.vllm.compat.planning import Planning

PLANNING = Planning(
    "vllm.v1.core.kv_cache_planning",
    pool_bytes_takes=vllm_0_32.PLANNING.pool_bytes_takes,
    configs_take=(*vllm_0_32.PLANNING.configs_take, "global_kv_cache_groups"),
)

USES = (*PLANNING.uses, *vllm_0_30.SINCE, *vllm_0_32.SINCE)

UNASKED = vllm_0_30.UNASKED

CARRIES_DRAFTS = vllm_0_32.CARRIES_DRAFTS

hash_block_size = vllm_0_32.hash_block_size
prefix_cacheable_groups = vllm_0_30.prefix_cacheable_groups
has_layer_views = vllm_0_30.has_layer_views
adapt_scheduler = vllm_0_30.adapt_scheduler
