"""vLLM 0.33: the planning of KV memory is a module of its own."""

from __future__ import annotations

from penstock.vllm.compat import vllm_0_32
from penstock.vllm.compat.planning import Planning
from penstock.vllm.compat.uses import Use

PLANNING = Planning(
    "vllm.v1.core.kv_cache_planning",
    pool_bytes_takes=vllm_0_32.PLANNING.pool_bytes_takes,
    configs_take=(*vllm_0_32.PLANNING.configs_take, "global_kv_cache_groups"),
)

USES = (*PLANNING.uses, Use("vllm.v1.kv_cache_interface", "KVCacheConfig.hash_block_size"))

hash_block_size = vllm_0_32.hash_block_size
