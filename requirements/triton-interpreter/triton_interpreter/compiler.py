"""What Triton asks of a backend's compiler. Interpreted kernels are not compiled."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend

_UNUSED = "kernels are interpreted: set TRITON_INTERPRET=1"


class Compiler(BaseBackend):
    """Stands in a table of backends."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Whether this is the backend for a device."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Names the compiler's version."""
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> object:
        """Not called."""
        raise NotImplementedError(_UNUSED)

    def add_stages(self, *_: object) -> None:
        """Not called."""
        raise NotImplementedError(_UNUSED)

    def load_dialects(self, context: Any) -> None:
        """Not called."""
        raise NotImplementedError(_UNUSED)

    def get_module_map(self) -> dict[str, Any]:
        """No functions of a device's library."""
        return {}
