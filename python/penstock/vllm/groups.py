"""The KV-cache groups that blocks are loaded and stored of.

vLLM gives layers that need different blocks a block table each (hybrid models: some layers attend
to all tokens, others to the last few). A uniform model has one group.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Layers that share one block table."""

    index: int
    """Among vLLM's groups, of which some may not be transferred."""
    kind: str
    """vLLM's name for it, like ``full_attention``."""
    block_size: int
    """Tokens in a block."""
    window: int | None
    """Tokens that a layer attends to, the present one included; None for all before it."""
    dtype: str
    layer_names: tuple[str, ...]


Groups = tuple[Group, ...]
"""All groups of a model that are transferred. How far they can be loaded, the catalogue tells."""
