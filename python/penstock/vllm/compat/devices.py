"""The device that holds the KV cache, and the cores that threads may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

from penstock.errors import ConfigError


def is_cpu() -> bool:
    """Whether this is vLLM's CPU build."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def is_rocm() -> bool:
    """Whether this is vLLM's build for AMD's GPUs, whose tensors call themselves CUDA's too."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm())


def kernel_packing(vllm_config: Any) -> str:
    """The kernels whose pages only kernels of their kind read; empty for vLLM's plain CPU kernels.

    Kernels for CPUs with matrix units keep K in tiles. Kernels for GPUs keep K and V of a token
    side by side, where those for CPUs have all K of a head first.
    """
    from vllm.platforms import current_platform

    if not is_cpu():
        return str(current_platform.device_type)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = vllm_config.model_config, vllm_config.cache_config
    kind = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return "" if kind in ("vec", "vec16") else str(kind)


def cuda_device(devices: AbstractSet[Any]) -> int | None:
    """The ordinal of the CUDA device that the KV cache's tensors are on; None for host memory.
    `devices` are the devices of all the tensors.

    Raises:
        ConfigError: the tensors are on several devices, or on a kind of device that Penstock cannot
            copy from.
    """
    kinds = {device.type for device in devices}
    if len(devices) > 1 or not kinds <= {"cpu", "cuda"}:
        raise ConfigError(
            f"the KV cache is on {', '.join(map(str, sorted(devices, key=str)))}; Penstock "
            "copies from host memory or from one CUDA device. Serve without Penstock"
        )
    return next((device.index or 0 for device in devices if device.type == "cuda"), None)


def current_stream(cuda_device: int) -> int:
    """The handle of the stream on which this thread gives the device its work."""
    import torch

    return int(torch.cuda.current_stream(cuda_device).cuda_stream)


@contextmanager
def operators_cores() -> Iterator[None]:
    """On a CPU, threads started inside may run on every core that the operator gave to the engine.

    vLLM binds its CPU worker to the cores that the model computes on, and threads inherit this. So
    copies and transfers would take the model's time while other cores idle. The process that
    started the worker still has the operator's cores.

    With a GPU, the model needs few cores, and a worker's cores are those near its device
    (``--numa-bind``). Threads stay on these cores, so the memory that they allocate is near the
    device too.
    """
    if not is_cpu():
        yield
        return
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
