"""Translates vLLM's configuration into facts for the worker half, and offers it vLLM's services."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from penstock._native import TensorView
from penstock.vllm import compat
from penstock.vllm.adapters import LoadedAdapters
from penstock.vllm.groups import Group, Groups
from penstock.vllm.model_share import live_models
from penstock.vllm.worker import KvMemory, Services, WorkerFacts


def worker_facts(vllm_config: Any, kv_cache_config: Any) -> WorkerFacts:
    """The facts in vLLM's configuration, for the rank of this process.

    Raises:
        ConfigError: the configuration has something that is not supported. The message says what,
            and what to do.
    """
    groups = compat.transfer_groups(vllm_config, kv_cache_config)
    for group in groups:
        if group.state is None:
            compat.check_kv_types(vllm_config, group.layer_names)
    layers, heads = compat.model_extent(vllm_config, groups)
    rank = compat.tp_rank()
    return WorkerFacts(
        groups=groups,
        backends={
            position: compat.backend_names(vllm_config, group.layer_names)
            for position, group in enumerate(groups)
        },
        num_blocks=kv_cache_config.num_blocks,
        layers=layers,
        heads=heads,
        stages=compat.stages(vllm_config, layers),
        tensor_ranks=vllm_config.parallel_config.tensor_parallel_size,
        tensor_rank=rank,
        tokens_per_step=compat.tokens_per_step(vllm_config),
        requests_per_step=compat.requests_per_step(vllm_config),
        has_noisy_inputs=compat.has_noisy_inputs(vllm_config),
        routes=vllm_config.model_config.get_num_experts() > 0,
    )


def services(vllm_config: Any) -> Services:
    """vLLM's services for the worker half in this process."""
    adapters = LoadedAdapters()
    if vllm_config.lora_config is not None:
        compat.watch_adapters(vllm_config, adapters)
    return Services(
        current_stream=compat.current_stream,
        engine_cores=compat.operators_cores,
        rest=compat.rest,
        agrees=adapters.agrees,
        read_weights=functools.partial(live_models, vllm_config),
    )


def kv_memory(groups: Groups, layers: int, kv_caches: Mapping[str, Any]) -> KvMemory:
    """The tensors that vLLM registered, as numbers. `layers` is the number of the model's layers.

    Raises:
        ConfigError: the tensors are on a device without a copy executor.
    """
    own = [name for group in groups for name in group.layer_names if name in kv_caches]
    return KvMemory(
        views=[
            [
                _view(_layer_index(group, name, layers), kv_caches[name])
                for name in group.layer_names
                if name in kv_caches
            ]
            for group in groups
        ],
        cuda_device=compat.cuda_device({kv_caches[name].device for name in own}),
        owners=[kv_caches[name] for name in own],
    )


def _layer_index(group: Group, name: str, layers: int) -> int:
    """A layer's index in the model, or in the drafter that it belongs to."""
    if group.draft is not None:
        return compat.draft_layer_index(name, layers)
    return compat.layer_index(name, layers=layers if group.state else None)


def _view(layer: int, tensor: Any) -> TensorView:
    memory = tensor.untyped_storage()
    return TensorView(
        layer,
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        itemsize=tensor.element_size(),
        storage_address=memory.data_ptr(),
        storage_bytes=memory.nbytes(),
    )
