"""The KV-cache groups whose blocks are loaded and stored.

In hybrid models some layers attend to all tokens, others to the last few, and others keep one state
for all tokens before. Such layers need different blocks, so vLLM puts them into different groups,
each with a block table. A uniform model has one group.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """The state of a layer that reads no KV of tokens before: recurrent layers, short convolutions.

    A block of such a group is the state after the block's last token, whatever came before."""

    kind: str
    """vLLM's name for the kind of layer, like ``mamba2``."""
    shapes: tuple[tuple[int, ...], ...]
    """The tensors of one layer on one rank, in the order in which they lie in a page."""
    dtypes: tuple[str, ...]
    order: str
    """The order of a convolution's axes in memory."""
    device: str
    """The kind of device. Kernels of different kinds write states in different orders."""


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
    state: State | None = None
    """What the layers keep instead of each token's KV; None for attention."""


Groups = tuple[Group, ...]
"""All groups of a model that are transferred. The catalogue tells how far they can be loaded."""
