"""A CUDA device as the tests of order see it: PyTorch's, or the stand-in for its driver.

The stand-in's memory is the host's. What PyTorch would give a stream is called on the stand-in's
stream, in its turn. `scripts/cuda-standin.sh` provides it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

ORDINAL = 0
LONG = 1_500_000_000
"""Cycles of a real device's clock: most of a second. Much longer than it takes to submit a job."""
LIMIT = 60.0
"""Seconds for whatever must come in the end."""


class Mark(Protocol):
    """A place in a stream's work."""

    def query(self) -> bool:
        """Whether all work before it is done."""


class Device(Protocol):
    """A device with a current stream."""

    name: str

    def memory(self, sizes: list[int]) -> tuple[torch.Tensor, int]:
        """Bytes of the device, and how far their addresses for the device are from PyTorch's."""

    @property
    def stream(self) -> int:
        """The current stream's handle."""

    def own_stream(self) -> Any:
        """A context with a new current stream."""

    def run(self, work: Callable[[], object]) -> None:
        """Gives the current stream work."""

    def hold(self) -> Callable[[], None]:
        """Keeps the current stream busy: for long, or until what is returned is called."""

    def compute(self, amount: int) -> None:
        """Keeps the current stream busy for a short time."""

    def mark(self) -> Mark:
        """The place after all work of the current stream."""

    def synchronize(self) -> None:
        """Returns when all work of all streams is done."""


class Cuda:
    """PyTorch's device."""

    name = "CUDA"

    def __init__(self) -> None:
        self._factor = torch.randn(2048, 2048, device=f"cuda:{ORDINAL}", dtype=torch.bfloat16)
        # Modules of kernels are loaded at their first use, which may wait for the device.
        torch.cuda._sleep(1000)
        self.compute(1)
        self.synchronize()

    def memory(self, sizes: list[int]) -> tuple[torch.Tensor, int]:
        return torch.empty(sizes, dtype=torch.uint8, device=f"cuda:{ORDINAL}"), 0

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream(ORDINAL).cuda_stream)

    def own_stream(self) -> Any:
        return torch.cuda.stream(torch.cuda.Stream())

    def run(self, work: Callable[[], object]) -> None:
        work()

    def hold(self) -> Callable[[], None]:
        torch.cuda._sleep(LONG)
        return lambda: None

    def compute(self, amount: int) -> None:
        for _ in range(amount):
            self._factor = torch.nn.functional.normalize(self._factor @ self._factor)
        torch.cuda._sleep(amount * 1_000_000)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record()
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize()


_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class StandIn:
    """The stand-in for the driver."""

    name = "stand-in"
    stream = 0

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ORDINAL)
        self._call("cuCtxPushCurrent_v2", context)
        relaxed = ctypes.c_int(2)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(relaxed))
        # What streams call must stay until they have.
        self._functions: list[Any] = []
        self._memory: list[torch.Tensor] = []
        self._streams = [0]

    def _call(self, name: str, *arguments: Any) -> None:
        answer = getattr(self._driver, name)(*arguments)
        assert answer == 0, f"{name} answered {answer}"

    def memory(self, sizes: list[int]) -> tuple[torch.Tensor, int]:
        tensor = torch.empty(sizes, dtype=torch.uint8)
        self._memory.append(tensor)
        address = ctypes.c_uint64()
        start, length = tensor.data_ptr(), ctypes.c_size_t(tensor.nbytes)
        self._call(
            "penstock_standin_adopt", ORDINAL, ctypes.c_void_p(start), length, ctypes.byref(address)
        )
        return tensor, address.value - start

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        handle = ctypes.c_void_p()
        self._call("cuStreamCreateWithPriority", ctypes.byref(handle), 1, 0)
        assert handle.value is not None
        self._streams.append(handle.value)
        before, self.stream = self.stream, handle.value
        try:
            yield
        finally:
            self.stream = before

    def run(self, work: Callable[[], object]) -> None:
        function = _HostFunction(lambda _: (work(), None)[1])
        self._functions.append(function)
        self._call("cuLaunchHostFunc", ctypes.c_void_p(self.stream), function, None)

    def hold(self) -> Callable[[], None]:
        gate = threading.Event()
        self.run(lambda: gate.wait(LIMIT))
        return gate.set

    def compute(self, amount: int) -> None:
        for _ in range(amount):
            self.run(lambda: None)

    def mark(self) -> Mark:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 3)
        self._call("cuEventRecord", event, ctypes.c_void_p(self.stream))
        driver = self._driver

        class Recorded:
            def query(self) -> bool:
                return bool(driver.cuEventQuery(event) == 0)

        return Recorded()

    def synchronize(self) -> None:
        for stream in self._streams:
            self._call("cuStreamSynchronize", ctypes.c_void_p(stream))


def find() -> Device | None:
    """The device here, if there is one."""
    if torch.cuda.is_available():
        return Cuda()
    if "PENSTOCK_STANDIN_DEVICES" in os.environ:
        return StandIn()
    return None
