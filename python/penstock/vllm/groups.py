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
class Draft:
    """The layers of a drafter: a draft model, or an EAGLE or MTP head. They are counted from 0."""

    layers: int
    """All layers of the drafter, whatever their group."""
    heads: int
    """KV heads over all ranks."""


@dataclass(frozen=True)
class Packing:
    """How a page is packed, where it is not each token's K and V side by side, head by head.

    All that a page needs is in it, scales too. So its bytes are complete, whatever they mean.
    """

    mode: str
    """vLLM's name for the quantization, like ``int8_per_token_head``."""
    content_bytes: int
    """Bytes of a token in one slot."""
    slots: int | None
    """The slots of a rank's page, if they are not to be taken for its KV heads. Then a page cannot
    be cut by heads. None: slot and head are the same, and a slot needs no other."""
    device: str
    """The kind of device. Kernels of different kinds may pack in different orders."""


@dataclass(frozen=True)
class Group:
    """Layers that share one block table: a KV-cache group of vLLM, or a drafter's layers in it."""

    index: int
    """The position of its block table among vLLM's groups. Not all of vLLM's groups may be
    transferred. A drafter's layers share a block table with the model's own."""
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
    draft: Draft | None = None
    """The drafter whose layers these are; None for the model's own."""
    packing: Packing | None = None
    """How the pages are packed; None if they are not."""
    element: str | None = None
    """The type of the numbers that pages are made of, as coders call it; None if there are several,
    or if there is no coder for it. It decides only how well values can be compressed."""
    numbers: str | None = None
    """The type of the numbers for comparisons, whether or not there is a coder. Without it, KV that
    differs says nothing."""

    @property
    def is_whole(self) -> bool:
        """Whether a rank's part of a layer cannot be cut by heads."""
        return self.state is not None or self._slots is not None

    @property
    def gives_blocks_back(self) -> bool:
        """Whether vLLM takes blocks of the group back while their request still computes."""
        return self.window is not None or self.state is not None

    @property
    def _slots(self) -> int | None:
        return None if self.packing is None else self.packing.slots

    def extent(self, layers: int, heads: int, ranks: int) -> tuple[int, int]:
        """Layers and heads that the group's objects are named by, in a model of so many layers, KV
        heads and tensor-parallel ranks. Each rank's part of a state counts as a head, and so does
        each slot of a page that cannot be cut: no other degree has such parts."""
        if self.draft is not None:
            layers, heads = self.draft.layers, self.draft.heads
        if self.state is not None:
            return layers, ranks
        return layers, heads if self._slots is None else min(heads, ranks) * self._slots

    def heads_of_rank(self, heads: int, ranks: int, rank: int) -> tuple[int, int]:
        """The heads of the group that a tensor-parallel rank holds, as a half-open range, in a
        model of so many KV heads."""
        unit = self._slots or 1
        first, end = heads_of_rank(self.extent(0, heads, ranks)[1] // unit, ranks, rank)
        return first * unit, end * unit

    def replica_of_rank(self, heads: int, ranks: int, rank: int) -> tuple[int, int]:
        """A tensor-parallel rank's number among the ranks that hold the same part of the group, and
        the number of such ranks, in a model of so many KV heads."""
        parts = self.extent(0, heads, ranks)[1] // (self._slots or 1)
        count = max(1, ranks // parts)
        return rank % count, count

    def cut(self, layers: int | None, heads: int | None) -> tuple[int | None, int | None]:
        """Layers and heads of the group's objects, if those of the model's attention have so many.
        None stands for all that a rank has."""
        if self.draft is not None:
            layers, heads = None, None if heads is None else 1
        return layers, None if self.is_whole else heads


def heads_of_rank(heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """The KV heads that a tensor-parallel rank holds, as a half-open range.

    With fewer KV heads than ranks, vLLM gives `ranks / heads` consecutive ranks the same head.
    """
    if heads >= ranks:
        own = heads // ranks
        return rank * own, (rank + 1) * own
    head = rank * heads // ranks
    return head, head + 1


Groups = tuple[Group, ...]
"""All groups of a model that are transferred. The catalogue tells how far they can be loaded."""
