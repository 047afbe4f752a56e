"""vLLM 0.33: a platform may group the layers and say what a block takes, plug-ins bring types of
KV, and connectors hear of sleep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.vllm.compat import vllm_0_32
from penstock.vllm.compat.planning import Planning
from penstock.vllm.compat.uses import Use

_MODULE = "vllm.v1.core.kv_cache_planning"
_BUILDER = "vllm.v1.core.kv_cache_config_builder"


class PlanningByBuilder(Planning):
    """The planning functions of vLLM that ask a builder, which the platform chooses."""

    @property
    def uses(self) -> tuple[Use, ...]:
        """The uses of these functions, for the contract."""
        configs = ("vllm_config", "kv_cache_specs", "available_memory", "global_kv_cache_groups")
        return (
            Use(_BUILDER, "get_kv_cache_config_builder", ("vllm_config",)),
            Use(self.module, "get_global_kv_cache_groups", ("vllm_config", "kv_cache_specs")),
            Use(
                self.module,
                "_pool_bytes_per_block_from_builder",
                ("builder", *self.pool_bytes_takes),
            ),
            *self._uses_of_all(*configs),
        )

    def kv_cache_groups(self, vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> Any:
        """The groups of all layers, from the specs of each worker's layers."""
        return self._function("get_global_kv_cache_groups")(vllm_config, specs)

    def bytes_per_block(self, vllm_config: Any, groups: Any) -> int:
        """Bytes of a block in a worker's groups."""
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder

        measure = self._function("_pool_bytes_per_block_from_builder")
        return int(measure(get_kv_cache_config_builder(vllm_config), vllm_config, groups))


class Vllm033(vllm_0_32.Vllm032):
    """What differs in 0.33."""

    PLANNING = PlanningByBuilder(_MODULE, vllm_0_32.Vllm032.PLANNING.pool_bytes_takes)

    TELLS_BEFORE_SLEEP = True

    HOLDS_PROMPTS_ALONE = True

    USES = (
        *PLANNING.uses,
        *vllm_0_32.SINCE,
        Use("vllm.config.cache", "get_kv_cache_dtype_handler", ("name",)),
    )

    def is_brought_type(self, kv_type: str) -> bool:
        """Whether a plug-in has brought this type of KV, or what is meant by its name."""
        from vllm.config.cache import get_kv_cache_dtype_handler

        return get_kv_cache_dtype_handler(kv_type) is not None
