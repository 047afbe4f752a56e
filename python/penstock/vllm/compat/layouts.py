"""Layouts of the KV cache: what attention backends list, and vLLM's resolution of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast


def attention_backends(vllm_config: Any) -> list[Any]:
    """The model's attention backend classes; the default backend if no model is loaded."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    return cast("list[Any]", get_current_attn_backends(vllm_config))


def listed_layouts(backends: Sequence[Any]) -> list[str]:
    """The KV layouts that vLLM lists for these backends together, most preferred first."""
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

    return [layout.name for layout in get_supported_kv_cache_layouts(backends)]


def takes_any_layout(backend: Any) -> bool:
    """Whether the backend's kernels take any layout, as those for layers that keep a state do."""
    return backend.supported_kv_cache_layouts() is None


def kernel_block_size(vllm_config: Any, backends: Sequence[Any]) -> int:
    """Tokens of the blocks that the kernels take. If vLLM's blocks are larger, vLLM splits them."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.utils import select_common_block_size

    block_size = int(vllm_config.cache_config.block_size)
    try:
        # FlashAttention 4 takes special sizes with some heads and KV types. It asks the current
        # configuration for them, and there is none when workers report.
        with set_current_vllm_config(vllm_config):
            return int(select_common_block_size(block_size, list(backends)))
    except ValueError:
        # No size fits. vLLM itself refuses to start and says so.
        return block_size


def has_shared_layers(vllm_config: Any) -> bool:
    """Whether layers use the KV of another layer, as in Gemma 4. Told from the loaded model, or
    from its configuration if none is loaded."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    if layers:
        return any(
            getattr(layer, "kv_sharing_target_layer_name", None) for layer in layers.values()
        )
    return bool(getattr(vllm_config.model_config.hf_text_config, "num_kv_shared_layers", 0))


def own_specs(vllm_config: Any) -> list[Any]:
    """The KV-cache specs of the loaded model's layers that have a KV cache of their own."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    own = (each for each in layers if not getattr(each, "kv_sharing_target_layer_name", None))
    specs = (each.get_kv_cache_spec(vllm_config) for each in own)
    return [spec for spec in specs if spec is not None]


def forced_layout() -> str | None:
    """The layout that the environment variable VLLM_KV_CACHE_LAYOUT asks for."""
    import vllm.envs

    name: str | None = vllm.envs.VLLM_KV_CACHE_LAYOUT
    return {"NHD": "LBNHC", "HND": "LBHNC"}.get(name, name) if name else None


def wrap_layout_resolution(
    report: Callable[[Any, Callable[[], list[str]]], list[str]],
    decide: Callable[[Any, Sequence[Sequence[str]], Sequence[Any]], None],
) -> None:
    """Installs two hooks, once in a process.

    `report` answers which layouts this process's worker supports. It gets the worker's
    configuration and a function that returns vLLM's own answer. `decide` is called before the
    engine core resolves the layout. It gets the engine's configuration, all workers' answers and
    all specs."""
    from vllm.v1.engine import core
    from vllm.v1.worker.worker_base import WorkerBase

    supported, resolve = WorkerBase.get_supported_kv_cache_layouts, core.resolve_kv_cache_layout
    if hasattr(supported, "__wrapped__"):
        return

    @functools.wraps(supported)
    def wrapped_supported(self: Any) -> list[str]:
        return report(self.vllm_config, lambda: cast("list[str]", supported(self)))

    @functools.wraps(resolve)
    def wrapped_resolve(vllm_config: Any, layouts: list[list[str]], specs: Any = None) -> Any:
        found = list(specs or ())
        decide(vllm_config, layouts, found)
        return resolve(vllm_config, layouts, found)

    WorkerBase.get_supported_kv_cache_layouts = wrapped_supported
    core.resolve_kv_cache_layout = wrapped_resolve
