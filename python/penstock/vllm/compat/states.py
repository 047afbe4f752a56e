"""Layers that keep a state instead of each token's KV: recurrent layers, short convolutions."""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError
from penstock.vllm.groups import State

_KEPT = "align"
"""vLLM's name for the way of caching in which a block holds the state at the block's end."""


def named(group: Any) -> str:
    """A group's layers, in words."""
    first, *others = group.layer_names
    return f"{first} and {len(others)} others" if others else str(first)


def state_of(group: Any, kv_cache_config: Any) -> State:
    """What a group of such layers keeps.

    Raises:
        ConfigError: blocks of the group do not hold states at their ends, or more than these.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    from vllm.platforms import current_platform

    spec = group.kv_cache_spec
    layers = named(group)
    if spec.mamba_cache_mode != _KEPT:
        raise ConfigError(
            f"the model's layers {layers} keep a state, and vLLM keeps none to go on from: switch "
            "its prefix cache on (--enable-prefix-caching)"
        )
    if spec.num_speculative_blocks:
        raise ConfigError(
            f"the model's layers {layers} keep a state, and speculative decoding moves it between "
            "blocks: switch one of the two off, or serve without Penstock"
        )
    unit = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    if unit is not None and unit < spec.block_size:
        raise ConfigError(
            f"the model's layers {layers} keep a state, and vLLM keeps some of them within blocks "
            f"of {spec.block_size} tokens, every {unit}: leave --prefix-match-unit out, and give "
            "all layers blocks of one size (--block-size)"
        )
    return State(
        kind=str(spec.mamba_type.name).lower(),
        shapes=tuple(tuple(int(size) for size in shape) for shape in spec.shapes),
        dtypes=tuple(str(dtype) for dtype in spec.dtypes),
        order=str(get_conv_state_layout()),
        device=str(current_platform.device_type),
    )
