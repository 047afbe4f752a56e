"""vLLM 0.30 and 0.31."""

from __future__ import annotations

from typing import Any

from penstock.vllm.compat.planning import Planning
from penstock.vllm.compat.uses import Use

_MODULE = "vllm.v1.core.kv_cache_utils"

PLANNING = Planning(
    _MODULE,
    pool_bytes_takes=("kv_cache_groups",),
    configs_take=("vllm_config", "kv_cache_specs", "available_memory"),
)

USES = (
    *PLANNING.uses,
    Use(_MODULE, "resolve_kv_cache_block_sizes", ("kv_cache_config", "vllm_config")),
)


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Tokens of the blocks that hashes are made of; None for those of the only group."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])
