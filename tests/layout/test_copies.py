"""Copies of blocks, from and into tensors of every layout, against numpy's own indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, LayoutError
from penstock.layout import Descriptor, TensorView
from penstock.layout.negotiate import LAYOUTS


class Kv:
    """KV of every (layer, block, head, token) in one array, in the memory order of a layout."""

    def __init__(self, layout: str, sizes: dict[str, int], present: list[int]) -> None:
        self.memory = np.zeros([sizes[axis] for axis in layout], np.uint8)
        rng = np.random.default_rng(1)
        self.memory[...] = rng.integers(1, 256, self.memory.shape)
        self.logical = self.memory.transpose([layout.index(axis) for axis in "LBHNC"])
        self.present = present
        views = [
            TensorView(
                layer,
                address=self.memory.ctypes.data + layer * self.logical.strides[0],
                shape=self.logical.shape[1:],
                strides=self.logical.strides[1:],
                itemsize=1,
                storage_address=self.memory.ctypes.data,
                storage_bytes=self.memory.nbytes,
            )
            for layer in present
        ]
        self.descriptor = Descriptor.detect(views, stage=(0, sizes["L"]))

    def expected(self, blocks: list[int], span: tuple[int, ...], interior: str) -> bytes:
        order = (0, 1, 2, 3) if interior == "HNC" else (0, 2, 1, 3)
        layers = [layer for layer in self.present if span[0] <= layer < span[1]]
        parts = (
            self.logical[layers, block, span[2] : span[3]].transpose(order) for block in blocks
        )
        return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)


@st.composite
def cases(draw: Any) -> tuple[Kv, list[int], tuple[int, int, int, int], str]:
    sizes = {axis: draw(st.integers(1, 4)) for axis in "LBHN"} | {"C": draw(st.integers(1, 9))}
    present = draw(st.sets(st.integers(0, sizes["L"] - 1), min_size=1))
    kv = Kv(draw(st.sampled_from(LAYOUTS)), sizes, sorted(present))
    # The first element has to be in the group, or nothing would be copied.
    layer = draw(st.sampled_from(sorted(present)))
    first, end = draw(st.integers(0, layer)), draw(st.integers(layer + 1, sizes["L"]))
    head = draw(st.integers(0, sizes["H"] - 1))
    span = (first, end, head, draw(st.integers(head + 1, sizes["H"])))
    blocks = draw(
        st.lists(st.integers(0, sizes["B"] - 1), min_size=1, max_size=sizes["B"], unique=True)
    )
    return kv, blocks, span, draw(st.sampled_from(["HNC", "NHC"]))


@given(cases(), st.booleans())
def test_any_part_of_any_layout_in_either_order(
    case: tuple[Kv, list[int], tuple[int, int, int, int], str], checksum: bool
) -> None:
    kv, blocks, span, interior = case
    descriptor = kv.descriptor.with_interior(interior)
    expected = kv.expected(blocks, span, interior)
    out = bytearray(len(expected) + 3)
    assert descriptor.gather(blocks, span, out, checksum=checksum) == len(expected)
    assert out == expected + bytes(3)

    other = bytes(255 - byte for byte in expected)
    rest = kv.memory.copy()
    assert descriptor.scatter(blocks, span, other + b"more") == len(expected)
    assert kv.expected(blocks, span, interior) == other
    descriptor.scatter(blocks, span, expected)
    assert (kv.memory == rest).all()


def test_what_is_not_there_is_refused_before_anything_is_touched() -> None:
    kv = Kv("BLHNC", {"L": 4, "B": 3, "H": 2, "N": 2, "C": 4}, [0, 2])
    whole = (0, 4, 0, 2)
    out = bytearray(1000)
    with pytest.raises(LayoutError, match="block 3 of 3"):
        kv.descriptor.gather([0, 3], whole, out)
    with pytest.raises(LayoutError, match="outside the share"):
        kv.descriptor.gather([0], (0, 4, 0, 3), out)
    with pytest.raises(ConfigError, match="no layer of the object's group"):
        kv.descriptor.gather([0], (1, 2, 0, 2), out)
    with pytest.raises(ConfigError, match="does not fit"):
        kv.descriptor.gather([0], whole, bytearray(7))
    with pytest.raises(ConfigError, match="writable"):
        kv.descriptor.gather([0], whole, bytes(1000))
    with pytest.raises(ConfigError, match="no tensors lie behind"):
        Descriptor.packed("BLHNC", whole, blocks=1, tokens=1, content_bytes=8).gather(
            [0], whole, out
        )
    assert out == bytes(1000)
