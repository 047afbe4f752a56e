"""vLLM's planning of KV memory: groups of layers, and the bytes of a block."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.vllm.compat.uses import Use


@dataclass(frozen=True)
class Planning:
    """The planning functions of versions of vLLM that have one way to group layers for all
    platforms."""

    module: str
    """The module that has them."""
    pool_bytes_takes: tuple[str, ...]
    """Parameters of ``_pool_bytes_per_block``."""

    @property
    def uses(self) -> tuple[Use, ...]:
        """The uses of these functions, for the contract."""
        return (
            Use(self.module, "get_kv_cache_groups", ("vllm_config", "kv_cache_spec")),
            Use(self.module, "_pool_bytes_per_block", self.pool_bytes_takes),
            *self._uses_of_all("vllm_config", "kv_cache_specs", "available_memory"),
        )

    def _uses_of_all(self, *configs_take: str) -> tuple[Use, ...]:
        """What is used in each version; `configs_take` are the parameters of the function that is
        wrapped."""
        worker = ("global_kv_cache_groups", "worker_spec")
        return (
            Use(self.module, "_project_kv_cache_groups_to_worker", worker),
            Use("vllm.v1.engine.core", "get_kv_cache_configs", configs_take, is_wrapped=True),
        )

    def kv_cache_groups(self, vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> Any:
        """The groups of all layers, from the specs of each worker's layers."""
        # In a new dictionary, because vLLM changes the one that it groups.
        merged = {name: spec for own in specs for name, spec in own.items()}
        return self._function("get_kv_cache_groups")(vllm_config, merged)

    def worker_groups(self, groups: Any, own: Mapping[str, Any]) -> Any:
        """The groups of one worker, from the specs of its layers."""
        return self._function("_project_kv_cache_groups_to_worker")(groups, own)

    def bytes_per_block(self, vllm_config: Any, groups: Any) -> int:
        """Bytes of a block in a worker's groups."""
        known = {"vllm_config": vllm_config, "kv_cache_groups": groups}
        return int(self._function("_pool_bytes_per_block")(*map(known.get, self.pool_bytes_takes)))

    def _function(self, name: str) -> Any:
        return getattr(importlib.import_module(self.module), name)
