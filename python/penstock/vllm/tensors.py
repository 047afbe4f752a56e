"""Digests of the tensors that a model computes with, as they are in memory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from penstock._native import digest

if TYPE_CHECKING:
    import torch

_CHUNK = 64 << 20
"""Bytes that are copied from a device and digested at a time. Part of the definition."""

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]], threads: int) -> dict[str, str]:
    """Name → digest of the tensor's type, shape and elements. Tensors that share their memory are
    read once."""
    known: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in known or not tensor.numel():
            known[place] = _digest(tensor, threads)
        found[name] = known[place]
    return found


def _digest(tensor: torch.Tensor, threads: int) -> str:
    import torch

    whole = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    elements = tensor.detach().contiguous().reshape(-1)
    if elements.numel():
        # A tensor of one type can be seen as bytes, of whatever type it is.
        data = elements.view(torch.uint8)
        for start in range(0, data.numel(), _CHUNK):
            chunk = data[start : start + _CHUNK]
            whole.update(digest(chunk if chunk.is_cpu else chunk.cpu(), threads=threads))
    return whole.hexdigest()


def one_digest(digests: Mapping[str, str]) -> str:
    """A digest of named digests."""
    lines = "".join(f"{name} {found}\n" for name, found in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def by_kind(digests: Mapping[str, str]) -> dict[str, str]:
    """The digests of tensors with the same name in each layer as one, under that name.

    >>> sorted(by_kind({"layers.0.rotary.cache": "ab", "layers.1.rotary.cache": "cd"}))
    ['layers.*.rotary.cache']
    """
    kinds: dict[str, dict[str, str]] = {}
    for name, found in digests.items():
        kinds.setdefault(_LAYER.sub("*", name), {})[name] = found
    return {kind: one_digest(members) for kind, members in sorted(kinds.items())}
