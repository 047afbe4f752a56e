"""Which layers and heads are on which rank."""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError
from penstock.vllm.groups import Groups


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


def model_extent(vllm_config: Any, groups: Groups = ()) -> tuple[int, int]:
    """Layers and KV heads of the whole model. For MLA, the one latent counts as a head.

    A model may run its layers several times, with KV of its own each time. vLLM counts the later
    times on after the last layer. In one stage, where `groups` name them all, they count too.
    """
    model = vllm_config.model_config
    heads = 1 if model.use_mla else int(model.get_total_num_kv_heads())
    layers = int(model.get_total_num_hidden_layers())
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        own = (group for group in groups if group.state is None and group.draft is None)
        indices = (layer_index(name) for group in own for name in group.layer_names)
        layers = max(layers, 1 + max(indices, default=-1))
    return layers, heads


def stages(vllm_config: Any, layers: int) -> list[tuple[int, int]]:
    """The layers of each pipeline stage, as half-open ranges."""
    from vllm.distributed.utils import get_pp_indices

    size = vllm_config.parallel_config.pipeline_parallel_size
    return [get_pp_indices(layers, rank, size) for rank in range(size)]


def tp_rank() -> int:
    """This worker's rank in its tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def rank() -> tuple[int, int]:
    """This worker's pipeline rank and tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_pp_group

    return int(get_pp_group().rank_in_group), tp_rank()
