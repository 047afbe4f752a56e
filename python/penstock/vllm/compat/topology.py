"""Which layers and heads are on which rank."""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError


def layer_index(layer_name: str, *, layers: int | None = None) -> int:
    """The layer's index in the whole model, from a name like ``model.layers.3.self_attn.attn``.

    Where a layer has attention and a state, vLLM counts the states on after the last layer. With
    `layers`, the number of layers, this is undone.

    Raises:
        ConfigError: the name does not hold exactly one index.
    """
    numbers = [part for part in layer_name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(f"cannot tell the index of layer {layer_name!r}")
    return int(numbers[0]) if layers is None else int(numbers[0]) % layers


def model_extent(vllm_config: Any) -> tuple[int, int]:
    """Layers and KV heads of the whole model. For MLA, the one latent counts as a head."""
    model = vllm_config.model_config
    heads = 1 if model.use_mla else int(model.get_total_num_kv_heads())
    return int(model.get_total_num_hidden_layers()), heads


def stages(vllm_config: Any) -> list[tuple[int, int]]:
    """The layers of each pipeline stage, as half-open ranges."""
    from vllm.distributed.utils import get_pp_indices

    size = vllm_config.parallel_config.pipeline_parallel_size
    layers, _ = model_extent(vllm_config)
    return [get_pp_indices(layers, rank, size) for rank in range(size)]


def tp_rank() -> int:
    """This worker's rank in its tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)
