"""vLLM 0.32."""

from __future__ import annotations

from typing import Any

from penstock.vllm.compat.planning import Planning
from penstock.vllm.compat.uses import Use

PLANNING = Planning(
    "vllm.v1.core.kv_cache_utils",
    pool_bytes_takes=("vllm_config", "kv_cache_groups"),
    configs_take=("vllm_config", "kv_cache_specs", "available_memory"),
)

USES = (*PLANNING.uses, Use("vllm.v1.kv_cache_interface", "KVCacheConfig.hash_block_size"))


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Tokens of the blocks that hashes are made of; None for those of the only group."""
    found: int | None = kv_cache_config.hash_block_size
    return found
