"""What Triton asks of a backend's driver: that there is a device, and which."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

_UNUSED = "kernels are interpreted: set TRITON_INTERPRET=1"


class Driver(DriverBase):
    """The host itself as a device."""

    @classmethod
    def is_active(cls) -> bool:
        """It is always there."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Not called."""
        raise NotImplementedError(_UNUSED)

    def get_current_target(self) -> GPUTarget:
        """One thread at a time."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        """Host memory."""
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Not called."""
        raise NotImplementedError(_UNUSED)
