"""The attention backends of a worker's layers: which types of KV they read, who sets scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.vllm.compat.devices import is_cpu


def backend_names(vllm_config: Any, layer_names: Iterable[str]) -> tuple[str, ...]:
    """vLLM's names for the attention backends of these layers, as far as they are on this rank."""
    layers = _layers(vllm_config, layer_names).values()
    return tuple(sorted({str(layer.get_attn_backend().get_name()) for layer in layers}))


def check_kv_types(vllm_config: Any, layer_names: Iterable[str]) -> None:
    """Refuses types of KV that the layers' attention backends do not list, on a CPU.

    vLLM asks backends for GPUs before it takes one. Its CPU platform takes its only backend
    unasked, and the kernels then read KV as the type that they know. What they compute would be
    pooled as if it were right.

    Raises:
        ConfigError: a backend does not list the type. The message has the types that it lists.
    """
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    if not is_cpu():
        return
    model = vllm_config.model_config
    for name, layer in _layers(vllm_config, layer_names).items():
        kv_type, backend = layer.kv_cache_dtype, layer.get_attn_backend()
        dtype = kv_cache_dtype_str_to_dtype(kv_type, model)
        if dtype == model.dtype:
            # Another word for `auto`.
            continue
        # Backends list 16-bit types, whatever the model's is.
        if dtype.itemsize == 1 and backend.supports_kv_cache_dtype(kv_type):
            continue
        raise ConfigError(
            f"--kv-cache-dtype {kv_type}: the attention backend {backend.get_name()} of layer "
            f"{name} reads {', '.join(backend.supported_kv_cache_dtypes)} only, where auto is the "
            f"model's {str(model.dtype).removeprefix('torch.')}. vLLM does not check that on a "
            "CPU: its answers would be wrong, and so would all that is pooled. Choose one of these"
        )


def make_scales(vllm_config: Any, kv_caches: Mapping[str, Any]) -> None:
    """Lets backends set the scales in their pages now, if they set them at first use.

    vLLM's Triton backend writes 1 into every token's scales when a layer is computed for the first
    time. A load that came before would lose its scales.
    """
    for name, layer in _layers(vllm_config, kv_caches).items():
        impl = getattr(layer, "impl", None)
        if impl is not None and getattr(impl, "_is_per_token_head_quant", False):
            impl._ensure_scale_caches(kv_caches[name])


def _layers(vllm_config: Any, layer_names: Iterable[str]) -> dict[str, Any]:
    """The attention layers of these names that are on this rank."""
    known = vllm_config.compilation_config.static_forward_context
    return {name: known[name] for name in layer_names if name in known}
