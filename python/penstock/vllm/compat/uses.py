"""What a use of vLLM's inside looks like, for the contract."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """A name of vLLM's that is used here."""

    module: str
    name: str
    """In the module; a method as ``Class.method``."""
    parameters: tuple[str, ...] | None = None
    """Those that it is given here, in order and without ``self``; None if it is not called."""
    is_wrapped: bool = False
    """Whether vLLM calls it through a wrapper of ours, which takes these and no others."""
