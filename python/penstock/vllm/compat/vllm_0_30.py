"""vLLM 0.30 and 0.31."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.vllm.compat.uses import Use

_PLANNING = "vllm.v1.core.kv_cache_utils"

USES = (
    Use(_PLANNING, "get_kv_cache_groups", ("vllm_config", "kv_cache_spec")),
    Use(_PLANNING, "_project_kv_cache_groups_to_worker", ("global_kv_cache_groups", "worker_spec")),
    Use(_PLANNING, "_pool_bytes_per_block", ("kv_cache_groups",)),
    Use(
        "vllm.v1.engine.core",
        "get_kv_cache_configs",
        ("vllm_config", "kv_cache_specs", "available_memory"),
        is_wrapped=True,
    ),
    Use(_PLANNING, "resolve_kv_cache_block_sizes", ("kv_cache_config", "vllm_config")),
)


def kv_cache_groups(vllm_config: Any, specs: Mapping[str, Any]) -> Any:
    """The groups of all layers, given their specs; changes the mapping."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    return get_kv_cache_groups(vllm_config, specs)


def worker_groups(groups: Any, own: Mapping[str, Any]) -> Any:
    """The groups as one worker has them, given the specs of its layers."""
    from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker

    return _project_kv_cache_groups_to_worker(groups, own)


def bytes_per_block(vllm_config: Any, groups: Any) -> int:
    """Bytes of a block in a worker's groups."""
    from vllm.v1.core.kv_cache_utils import _pool_bytes_per_block

    return int(_pool_bytes_per_block(groups))


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Tokens of the blocks that hashes are made of; None for those of the only group."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])
