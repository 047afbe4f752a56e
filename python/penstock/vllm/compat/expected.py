"""What an engine will find in a model, from the model's configuration alone: no weights are loaded.

vLLM asks the loaded layers for their specs. Here they are built from the same configuration, so
that `penstock doctor` can tell beforehand. `tests/e2e/test_doctor_agrees.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from penstock.errors import ConfigError
from penstock.vllm.compat.layouts import attention_backends
from penstock.vllm.compat.specs import spec_kind, transfer_groups

_STATES = {
    "mamba1_state_shape": "MAMBA1",
    "mamba2_state_shape": "MAMBA2",
    "short_conv_state_shape": "SHORT_CONV",
    "gated_delta_net_state_shape": "GDN_ATTN",
    "linear_attention_state_shape": "LINEAR",
}
"""vLLM's functions for the shapes of states, and its names for the kinds of layers. Each class of
models calls the function of its layers."""

_INDEXER, _WINDOW = "indexer", "sliding_attention"


def expected_specs(vllm_config: Any) -> list[Any]:
    """The KV-cache specs of the model's layers, one for each kind.

    Raises:
        ConfigError: the model keeps state that only the loaded model can describe.
    """
    from vllm.v1 import kv_cache_interface as specs

    model = vllm_config.model_config
    attention = _attention(vllm_config)
    if model.is_attention_free:
        return [_state(vllm_config)]
    if model.use_mla:
        # An index of each token is kept beside the latents, if attention is sparse.
        index = getattr(model.hf_text_config, "index_head_dim", None)
        latent = specs.MLAAttentionSpec(**attention)
        found = [latent]
        if index is not None:
            role = specs.SparseCacheRole.INDEXER
            found.append(replace(latent, head_size=index, cache_role=role))
    elif model.is_encoder_decoder:
        found = [specs.FullAttentionSpec(**attention), specs.CrossAttentionSpec(**attention)]
    elif (chunk := model.attention_chunk_size) is not None:
        chunked = specs.ChunkedLocalAttentionSpec(**attention, attention_chunk_size=chunk)
        found = [specs.FullAttentionSpec(**attention), chunked]
    else:
        found = _full_and_windows(vllm_config, attention)
    return [*found, _state(vllm_config)] if model.is_hybrid else found


def _attention(vllm_config: Any) -> dict[str, Any]:
    """What the specs of all attention layers have."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "block_size": cache.block_size,
        "num_kv_heads": model.get_num_kv_heads(vllm_config.parallel_config),
        "head_size": model.get_head_size(),
        "dtype": kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
    }


def _full_and_windows(vllm_config: Any, attention: dict[str, Any]) -> list[Any]:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    model = vllm_config.model_config
    window = model.get_sliding_window()
    # Without a list, as in Mistral's first model, all layers look back over the window.
    kinds = list(getattr(model.hf_text_config, "layer_types", None) or [_WINDOW])
    found = set()
    for layer, kind in enumerate(kinds):
        # The shape of heads may differ by layer.
        shape = model.model_arch_config[layer]
        heads = model.get_num_kv_heads(vllm_config.parallel_config, shape)
        own = attention | {"num_kv_heads": heads, "head_size": shape.head_size}
        if window and kind == _WINDOW:
            found.add(SlidingWindowSpec(**own, sliding_window=window))
        else:
            found.add(FullAttentionSpec(**own))
    return sorted(found, key=lambda spec: (spec_kind(spec), spec.head_size, spec.num_kv_heads))


def _state(vllm_config: Any) -> Any:
    """The spec of the layers that keep a state."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    model, cache = vllm_config.model_config, vllm_config.cache_config
    kind, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    names = kind.get_mamba_state_shape_from_config.__func__.__code__.co_names
    found = [_STATES[name] for name in names if name in _STATES]
    if len(found) != 1:
        raise ConfigError(
            f"{model.model} has layers that keep a state, and only the loaded model tells which: "
            "the server's log names them, and the layout that it gets"
        )
    return MambaSpec(
        shapes=tuple(kind.get_mamba_state_shape_from_config(vllm_config)),
        dtypes=tuple(kind.get_mamba_state_dtype_from_config(vllm_config)),
        block_size=cache.block_size,
        mamba_type=MambaAttentionBackendEnum[found[0]],
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=vllm_config.num_speculative_tokens,
    )


def expected_kinds(specs: Iterable[Any]) -> tuple[str, ...]:
    """The kinds of these specs, each once, by vLLM's names. A state has the name of its kind."""
    return tuple(sorted({_kind(spec) for spec in specs}))


def _kind(spec: Any) -> str:
    if (state := getattr(spec, "mamba_type", None)) is not None:
        return str(state.name).lower()
    role = getattr(spec, "cache_role", None)
    return _INDEXER if role is not None and role.value == _INDEXER else spec_kind(spec)


def expected_dtypes(specs: Iterable[Any]) -> tuple[str, ...]:
    """The types of KV and of states in these specs, each once."""
    found = (dtype for spec in specs for dtype in getattr(spec, "dtypes", None) or [spec.dtype])
    return tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in found))


def expected_backends(vllm_config: Any, specs: Iterable[Any]) -> list[Any]:
    """The backend classes of the model's layers."""
    from vllm.v1.attention.selector import get_mamba_attn_backend

    states = [spec.mamba_type for spec in specs if hasattr(spec, "mamba_type")]
    return [*attention_backends(vllm_config), *map(get_mamba_attn_backend, states)]


def expected_refusal(vllm_config: Any, specs: list[Any]) -> str | None:
    """Why an engine with Penstock refuses a model with these specs, in the words of its log; None
    if it serves it."""
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        UniformTypeKVCacheSpecs,
    )

    named = {f"model.layers.*.{_kind(spec)}.{n}": spec for n, spec in enumerate(specs)}
    groups = [KVCacheGroupSpec([name], spec) for name, spec in named.items()]
    # vLLM puts layers that need the same tokens into one group, even if their pages differ.
    if len(named) > 1 and (shared := UniformTypeKVCacheSpecs.from_specs(named)) is not None:
        groups = [KVCacheGroupSpec(list(named), shared)]
    config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    try:
        transfer_groups(vllm_config, config)
    except ConfigError as error:
        return str(error)
    return None


def attends_in_each_layer(vllm_config: Any) -> bool:
    """Whether every layer of a model both attends and keeps a state."""
    kinds = getattr(vllm_config.model_config.hf_text_config, "layers_block_type", None)
    return set(kinds or ()) == {"hybrid"}


def takes_images(vllm_config: Any) -> bool:
    """Whether prompts may have images or other inputs than text."""
    return bool(vllm_config.model_config.is_multimodal_model)
