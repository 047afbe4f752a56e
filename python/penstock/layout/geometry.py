"""How chunks are cut into objects: whole ranks, or pieces that other topologies can use.

By default an object is all that one rank holds of a block, up to :data:`OBJECT_BYTES`: few, large
transfers. Such objects are found only by engines whose ranks are cut alike. Portable objects are
cut at borders that other pipeline and tensor-parallel degrees have too, and keep heads and tokens
in one order (HNC) whatever the engine's layout, so that engines of any topology find each other's.
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
"""Default objects are cut by layers to this size where a rank's share is larger. Valkey and Redis
answer a GET of 8 MiB at about half the speed of one of 1 or 2 MiB: their allocator gives memory of
that size back to the system after each reply, and all its pages come anew with the next."""

_PORTABLE_DEGREE = 8
"""Tensor-parallel ranks up to which portable objects are never cut between: an object has the
heads that one of so many ranks has."""


@dataclass(frozen=True)
class Geometry:
    """The largest piece of a chunk that is one object."""

    layers: int | None
    """None: all that a rank holds."""
    heads: int | None
    interior: str | None
    """Order of heads and tokens in an object, HNC or NHC; None: the engine's own."""


def parse_geometry(text: str, layers: int, heads: int) -> Geometry:
    """The geometry that `rank`, `portable`, or a text like ``4x2`` (layers x KV heads) asks for,
    of a model with so many layers and KV heads.

    Portable objects have two layers (one, if the model's number is odd), and the KV heads of one
    of eight tensor-parallel ranks: stages with even numbers of layers and ranks up to eight find
    them whole.

    >>> parse_geometry("portable", layers=32, heads=8)
    Geometry(layers=2, heads=1, interior='HNC')
    >>> parse_geometry("4x2", layers=32, heads=8).layers
    4

    Raises:
        ConfigError: the text is none of these, or does not divide the model.
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
    """The geometry `rank`, cut so that no object exceeds :data:`OBJECT_BYTES`, if layers allow it.

    `layer_bytes` are those of one layer's part of a block on one rank; `stages` are the pipeline's,
    all of which have to be cut evenly.

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
