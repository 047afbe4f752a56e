"""KV caches without gaps, in any layout, as engines register them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock._native import Descriptor, TensorView


@dataclass(frozen=True)
class Shape:
    """Sizes of a KV cache. `content_bytes` is the bytes of key and value of one token and head."""

    layers: int
    heads: int
    tokens: int
    content_bytes: int
    blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers."""
        return self.layers * self.heads * self.tokens * self.content_bytes

    @property
    def whole(self) -> tuple[int, int, int, int]:
        """The span of a whole block: all layers and all heads."""
        return 0, self.layers, 0, self.heads

    @property
    def axes(self) -> Mapping[str, int]:
        """The size of each axis, by its letter in the names of layouts."""
        return {
            "L": self.layers,
            "B": self.blocks,
            "H": self.heads,
            "N": self.tokens,
            "C": self.content_bytes,
        }


def describe(shape: Shape, layout: str, address: int) -> Descriptor:
    """The descriptor of a KV cache at `address`, in this layout."""
    strides, stride = {}, 1
    for axis in reversed(layout):
        strides[axis] = stride
        stride *= shape.axes[axis]
    return Descriptor.detect(
        [
            TensorView(
                layer,
                address=address + layer * strides["L"],
                shape=[shape.axes[axis] for axis in "BHNC"],
                strides=[strides[axis] for axis in "BHNC"],
                itemsize=1,
                storage_address=address,
                storage_bytes=stride,
            )
            for layer in range(shape.layers)
        ]
    )
