"""How chunks are cut into objects: one per rank, or pieces that other topologies can use.

By default an object is all that one rank holds of a block, up to :data:`OBJECT_BYTES`. This gives
few, large transfers. But only engines that cut the model over their ranks in the same way find such
objects.

Portable objects are cut at borders that other pipeline and tensor-parallel degrees have too. They
keep heads and tokens in one order (HNC), whatever the engine's layout. So engines of any topology
find each other's objects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.errors import ConfigError

RANK = "rank"
PORTABLE = "portable"

OBJECT_BYTES = 2 << 20
"""Size to which a default object is cut, by layers, where a rank's share is larger.

Valkey and Redis answer a GET of 8 MiB at about half the speed of one of 1 or 2 MiB. Their allocator
returns 8 MiB to the system after each reply, so the next reply needs all these pages anew."""

_PORTABLE_DEGREE = 8
"""Tensor-parallel degree that portable objects are made for: an object has the KV heads that one
rank has at this degree. With this many ranks or fewer, no object is cut between ranks."""


@dataclass(frozen=True)
class Geometry:
    """The largest piece of a chunk that is one object."""

    layers: int | None
    """None: all that a rank holds."""
    heads: int | None
    interior: str | None
    """Order of heads and tokens in an object, HNC or NHC; None: the engine's own."""


def parse_geometry(text: str, layers: int, heads: int) -> Geometry:
    """The geometry that a text asks for: `rank`, `portable`, or layers x KV heads like ``4x2``.

    `layers` and `heads` are the model's layers and KV heads.

    Portable objects have two layers (one, if the model has an odd number of layers), and the KV
    heads of one of eight tensor-parallel ranks. So stages with even numbers of layers, and up to
    eight ranks, find whole objects.

    >>> parse_geometry("portable", layers=32, heads=8)
    Geometry(layers=2, heads=1, interior='HNC')
    >>> parse_geometry("4x2", layers=32, heads=8).layers
    4

    Raises:
        ConfigError: the text is none of these, or its numbers do not divide the model.
    """
    if text == RANK:
        return Geometry(None, None, None)
    if text == PORTABLE:
        return Geometry(1 if layers % 2 else 2, max(1, heads // _PORTABLE_DEGREE), "HNC")
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ConfigError(f"pool geometry {text!r}: {RANK}, {PORTABLE}, or layers x heads like 4x2")
    per_object = int(match[1]), int(match[2])
    if layers % per_object[0] or heads % per_object[1]:
        raise ConfigError(
            f"pool geometry {text}: a model of {layers} layers and {heads} KV heads cannot be cut "
            f"into objects of {per_object[0]} layers and {per_object[1]} heads"
        )
    return Geometry(*per_object, "HNC")


def limit_objects(
    geometry: Geometry, layer_bytes: int, stages: Sequence[tuple[int, int]]
) -> Geometry:
    """The geometry `rank`, cut by layers so that no object exceeds :data:`OBJECT_BYTES`, if layers
    allow it.

    `layer_bytes` is the size of one layer's part of a block on one rank. `stages` are the layers of
    the pipeline's stages; the cut must divide every stage evenly.

    >>> whole = Geometry(None, None, None)
    >>> limit_objects(whole, 512 << 10, [(0, 16)]).layers
    4
    >>> limit_objects(whole, 512 << 10, [(0, 6), (6, 8)]).layers
    2
    >>> limit_objects(whole, 64 << 10, [(0, 32)]).layers is None
    True
    """
    if layer_bytes * max(end - start for start, end in stages) <= OBJECT_BYTES:
        return geometry
    common = math.gcd(*(border for stage in stages for border in stage))
    fitting = [
        layers
        for layers in range(1, common + 1)
        if common % layers == 0 and layers * layer_bytes <= OBJECT_BYTES
    ]
    return replace(geometry, layers=max(fitting, default=1))
