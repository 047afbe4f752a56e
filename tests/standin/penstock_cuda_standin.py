"""The stand-in for CUDA's driver, as Python sees it, and a plug-in for vLLM's CPU build.

`scripts/cuda-standin.sh` puts both where programs find them: the stand-in as ``libcuda.so.1``, and
this as an entry point of vLLM. Penstock then takes vLLM's KV cache for the memory of a CUDA device.
All else is as on such a device: the driver's calls, pinned memory, streams that take their time,
events. Only the model still computes on the CPU: a step is over before a fence is raised behind it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

DEVICE = 0
"""The ordinal of the device that the KV cache seems to be on."""
DEFAULT_STREAM = 0


@cache
def driver() -> ctypes.CDLL:
    """The stand-in, with its devices."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuInit(0)
    return library


def adopt(start: int, length: int) -> int:
    """Takes memory of this process for the device's. Returns its address for the device.

    Raises:
        RuntimeError: the stand-in has no device.
    """
    address = ctypes.c_uint64()
    answer = driver().penstock_standin_adopt(
        DEVICE, ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.byref(address)
    )
    if answer:
        raise RuntimeError(f"the stand-in has no device {DEVICE}: {answer}")
    return address.value


def calls(name: str) -> int:
    """How often a call of the driver was made in this process, by its name without a version."""
    count = driver().penstock_standin_calls
    count.restype = ctypes.c_size_t
    return int(count(DEVICE, name.encode()))


def take_the_kv_cache_for_a_devices() -> None:
    """What vLLM calls in each of its processes."""
    from vllm.v1.worker.worker_base import WorkerBase

    from penstock._native import TensorView
    from penstock.vllm import compat, worker_facts

    WorkerBase.penstock_driver_calls = lambda _worker, name: calls(name)
    view = worker_facts._view

    def on_the_device(layer: int, tensor: Any) -> TensorView:
        host = view(layer, tensor)
        address = adopt(host.storage_address, host.storage_bytes)
        return TensorView(
            layer,
            address=address + host.address - host.storage_address,
            shape=host.shape,
            strides=host.strides,
            itemsize=host.itemsize,
            storage_address=address,
            storage_bytes=host.storage_bytes,
        )

    worker_facts._view = on_the_device
    compat.cuda_device = lambda _devices: DEVICE
    compat.current_stream = lambda _device: DEFAULT_STREAM
