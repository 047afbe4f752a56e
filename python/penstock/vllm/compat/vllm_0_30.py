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

BLOCK_SIZES = Use(_MODULE, "resolve_kv_cache_block_sizes", ("kv_cache_config", "vllm_config"))

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
"""Uses of this version and of all later ones."""

USES = (*PLANNING.uses, *SINCE, BLOCK_SIZES)

UNASKED: tuple[str, ...] = ()

CARRIES_DRAFTS = False


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Tokens of the blocks that hashes are computed over; None for the only group's block size."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def prefix_cacheable_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Numbers of the KV-cache groups that vLLM finds by prefix."""
    return tuple(kv_cache_config.prefix_cacheable_group_ids)


def has_layer_views(spec: Any) -> bool:
    """Whether vLLM makes a view of the KV cache for each layer of this kind."""
    return bool(spec.has_layer_views)


def adapt_scheduler() -> None:
    """Does nothing: this version's scheduler does all that is needed."""
