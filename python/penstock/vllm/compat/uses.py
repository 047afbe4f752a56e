"""The description of a use of vLLM's internals, for the contract."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """A name in vLLM that Penstock uses."""

    module: str
    name: str
    """The name in the module; a method as ``Class.method``."""
    parameters: tuple[str, ...] | None = None
    """The parameters that Penstock gives it, in order and without ``self``; None if Penstock does
    not call it."""
    is_wrapped: bool = False
    """Whether vLLM calls it through Penstock's wrapper, which takes exactly these parameters."""
