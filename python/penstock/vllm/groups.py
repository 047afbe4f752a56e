"""The KV-cache groups whose blocks are loaded and stored.

In hybrid models some layers attend to all tokens, and others to the last few. Such layers need
different blocks, so vLLM puts them into different groups, each with a block table. A uniform model
has one group.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Layers that share one block table."""

    index: int
    """Its position among vLLM's groups. Not all of vLLM's groups may be transferred."""
    kind: str
    """vLLM's name for its kind, like ``full_attention``."""
    block_size: int
    """Tokens in a block."""
    window: int | None
    """Number of tokens that a layer attends to, the present one included. None: all tokens."""
    dtype: str
    layer_names: tuple[str, ...]


Groups = tuple[Group, ...]
"""All groups of a model that are transferred. The catalogue tells how far they can be loaded."""
