"""vLLM 0.33: the planning of KV memory is a module of its own, and connectors hear of sleep."""

from __future__ import annotations

from penstock.vllm.compat import vllm_0_32
from penstock.vllm.compat.planning import Planning


class Vllm033(vllm_0_32.Vllm032):
    """What differs in 0.33."""

    PLANNING = Planning(
        "vllm.v1.core.kv_cache_planning",
        pool_bytes_takes=vllm_0_32.Vllm032.PLANNING.pool_bytes_takes,
        configs_take=(*vllm_0_32.Vllm032.PLANNING.configs_take, "global_kv_cache_groups"),
    )

    TELLS_BEFORE_SLEEP = True

    USES = (*PLANNING.uses, *vllm_0_32.SINCE)
