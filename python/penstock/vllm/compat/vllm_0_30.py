"""vLLM 0.30 and 0.31."""

from __future__ import annotations

from typing import Any

from penstock.vllm.compat.planning import Planning
from penstock.vllm.compat.uses import Use

_UTILITIES = "vllm.v1.core.kv_cache_utils"


class Vllm030:
    """What differs between versions of vLLM, as it is in 0.30 and 0.31.

    The class of each later version inherits from that of the version before.
    """

    PLANNING = Planning(_UTILITIES, pool_bytes_takes=("kv_cache_groups",))

    USES: tuple[Use, ...] = (
        *PLANNING.uses,
        Use(_UTILITIES, "resolve_kv_cache_block_sizes", ("kv_cache_config", "vllm_config")),
    )
    """All of vLLM that Penstock uses in this version, and not in all that are supported."""

    TELLS_BEFORE_SLEEP = False
    """Whether connectors are told before sleep mode takes the KV cache's memory away."""

    NAMES_SESSIONS_ANEW = False
    """Whether a block of a session gets another hash when the session drops a token of it."""

    HOLDS_PROMPTS_ALONE = False
    """Whether an engine without peers that compute in step with it holds prompts back, if it is
    told to."""

    CARRIES_DRAFTS = False
    """Whether the layers of drafters were tried with this version."""

    def hash_block_size(self, vllm_config: Any, kv_cache_config: Any) -> int | None:
        """Tokens of the blocks that hashes are computed over; None for the only group's block
        size."""
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])

    def is_brought_type(self, kv_type: str) -> bool:
        """Whether a plug-in has brought this type of KV: none can in this version."""
        return False
