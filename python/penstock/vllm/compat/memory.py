"""KV memory: bytes of a block on each worker, and a hook in vLLM's split of memory into blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.plan.split import Room
from penstock.vllm.compat.devices import is_cpu
from penstock.vllm.compat.versions import installed


def block_bytes(vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Bytes that a block takes on each worker, from the KV-cache specs of the worker's layers."""
    planning = installed().PLANNING
    groups = planning.kv_cache_groups(vllm_config, specs)
    return [
        planning.bytes_per_block(vllm_config, planning.worker_groups(groups, own)) if own else 0
        for own in specs
    ]


def request_blocks(vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> int:
    """Blocks that a request of the greatest length takes."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheConfig

    groups = installed().PLANNING.kv_cache_groups(vllm_config, specs)
    many = 1 << 20
    config = KVCacheConfig(num_blocks=many, kv_cache_tensors=[], kv_cache_groups=groups)
    requests: float = kv_cache_utils.get_max_concurrency_for_kv_cache_config(vllm_config, config)
    return round(many / requests)


def wrap_kv_memory(
    asks: Callable[[Any], bool],
    decide: Callable[[Any, Sequence[Mapping[str, Any]], Sequence[int], Sequence[Room]], list[int]],
) -> None:
    """Makes `decide` set the bytes of KV that each worker gets, once in a process. It applies to
    engines for whose configuration `asks` returns True."""
    from vllm.v1.engine import core
    from vllm.v1.executor import Executor

    measure, configure = Executor.determine_available_memory, core.get_kv_cache_configs
    if hasattr(configure, "__wrapped__"):
        return
    rooms: list[Room] = []

    @functools.wraps(measure)
    def wrapped_measure(self: Any) -> list[int]:
        available: list[int] = measure(self)
        if asks(self.vllm_config):
            rooms[:] = self.collective_rpc(_room)
        return available

    @functools.wraps(configure)
    def wrapped_configure(
        vllm_config: Any, specs: list[Any], available: list[int], *more: Any
    ) -> Any:
        if not (asks(vllm_config) and any(specs)):
            return configure(vllm_config, specs, available, *more)
        available = decide(vllm_config, specs, available, rooms)
        # vLLM divides by the bytes of a block. On a rank without attention layers these are zero,
        # so such ranks are left out.
        own = iter(configure(vllm_config, *_with_layers(specs, available), *more))
        configs = [next(own) if layers else None for layers in specs]
        return [config or _without_layers(configs) for config in configs]

    Executor.determine_available_memory = wrapped_measure
    core.get_kv_cache_configs = wrapped_configure


def _with_layers(specs: list[Any], available: list[int]) -> tuple[list[Any], list[int]]:
    kept = [(layers, given) for layers, given in zip(specs, available, strict=True) if layers]
    return [layers for layers, _ in kept], [given for _, given in kept]


def _without_layers(configs: Sequence[Any]) -> Any:
    """The configuration of a worker that has no layer in any group, made from another worker's."""
    other = next(config for config in configs if config is not None)
    return dataclasses.replace(
        other,
        kv_cache_tensors=[],
        kv_cache_groups=[
            dataclasses.replace(group, layer_names=[]) for group in other.kv_cache_groups
        ],
    )


def _room(worker: Any) -> Room:
    """The free bytes of a worker's device. Runs in each worker after it has measured the model.

    On a GPU, two amounts are subtracted: the memory that --gpu-memory-utilization keeps back for
    later buffers, and the memory of graphs that are captured later. vLLM estimates the graphs only
    if it measures the KV memory itself. With --kv-cache-memory-bytes, the memory kept back has to
    be enough."""
    import socket

    host = socket.gethostname()
    if is_cpu():
        from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

        node = get_allowed_cpu_list()[0].numa_node
        return Room((host, node), int(get_memory_node_info(node).available_memory))
    import torch

    device = worker.device
    free, total = torch.cuda.mem_get_info(device)
    kept = (1 - worker.cache_config.gpu_memory_utilization) * total
    kept += getattr(worker, "cudagraph_memory_estimate", 0)
    uuid = torch.cuda.get_device_properties(device).uuid
    return Room((host, str(uuid)), max(0, int(free - kept)))
