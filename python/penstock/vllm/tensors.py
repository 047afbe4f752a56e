"""Digests of the tensors that a model computes with, as they are in memory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from penstock._native import digest

if TYPE_CHECKING:
    import torch

_CHUNK = 64 << 20
"""Bytes that are copied from a device and digested at a time. Part of the definition."""

_WORDS = 1 << 22
"""Words of eight bytes that a device mixes at a time, so that what it makes of them stays small."""

_SAMPLE_BYTES = 4096
"""Bytes of a tensor that each of its samples has. Part of the definition."""

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def digest_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], threads: int, *, on_device: bool = False
) -> dict[str, str]:
    """Name → digest of the tensor's type, shape and elements. Tensors that share their memory are
    read once. With `on_device`, tensors on a device are :func:`reduced` there, which gives other
    digests than the bytes in host memory have; else they are copied."""
    known: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in known or not tensor.numel():
            known[place] = _digest(tensor, threads, on_device=on_device)
        found[name] = known[place]
    return found


def sample_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name → digest of the tensor's type, shape, and three samples: of its start, its middle and
    its end. No tensor is copied as a whole."""
    return {name: _sample(tensor) for name, tensor in tensors}


def _digest(tensor: torch.Tensor, threads: int, *, on_device: bool) -> str:
    if on_device and not tensor.is_cpu:
        return digest_on_device(tensor)
    whole, data = _head(tensor), _bytes(tensor)
    for start in range(0, data.numel(), _CHUNK):
        chunk = data[start : start + _CHUNK]
        whole.update(digest(chunk if chunk.is_cpu else chunk.cpu(), threads=threads))
    return whole.hexdigest()


def digest_on_device(tensor: torch.Tensor) -> str:
    """The digest of a tensor whose elements are :func:`reduced` where they are. What is copied of
    it there is bounded, however it lies in memory."""
    whole = _head(tensor)
    for slab in _slabs(tensor):
        whole.update(b"".join(number.to_bytes(8, "little") for number in reduced(_bytes(slab))))
    return whole.hexdigest()


def _slabs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in pieces of whole rows, each of at most `_CHUNK` bytes, if a row is no larger."""
    if not tensor.dim() or not tensor.numel():
        yield tensor
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    yield from tensor.split(max(1, _CHUNK // row_bytes))


def _sample(tensor: torch.Tensor) -> str:
    import torch

    found, elements = _head(tensor), tensor.numel()
    count = min(_SAMPLE_BYTES // tensor.element_size(), elements)
    starts = (0, (elements - count) // 2, elements - count)
    parts = [_elements(tensor, start, count) for start in starts]
    # One copy from a device for each tensor.
    found.update(torch.cat(parts).cpu().numpy().tobytes())
    return found.hexdigest()


_NUMBERS_OF_BYTES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def _elements(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """The `count` elements from `start` on, in their order, as bytes."""
    import torch

    tensor = tensor.detach()
    kind = _NUMBERS_OF_BYTES.get(tensor.element_size())
    if tensor.is_contiguous() or kind is None:
        return _bytes(tensor.reshape(-1)[start : start + count])
    # Not all types can be indexed.
    numbers = tensor.view(getattr(torch, kind))
    places = torch.arange(start, start + count, device=tensor.device)
    return _bytes(numbers[torch.unravel_index(places, tensor.shape)])


def _head(tensor: torch.Tensor) -> hashlib._Hash:
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in their order, as bytes."""
    import torch

    elements = tensor.detach().contiguous().reshape(-1)
    if not elements.numel():
        return torch.empty(0, dtype=torch.uint8)
    if elements.numel() == 1:
        # It may have any stride.
        elements = elements.as_strided((1,), (1,))
    # A tensor of one type can be seen as bytes, of whatever type it is.
    return elements.view(torch.uint8)


_MIX = tuple(
    value - (1 << 64) if value >= 1 << 63 else value
    for value in (
        0x9E3779B97F4A7C15,
        0xBF58476D1CE4E5B9,
        0x94D049BB133111EB,
        0xD6E8FEB86659FD93,
    )
)
"""Odd constants of two finalizers, as signed numbers: SplitMix64 (Steele, Lea and Flood, 2014) and
rrmxmx (Evensen, 2018)."""


def reduced(data: torch.Tensor) -> tuple[int, int]:
    """Two numbers of 64 bits that change with any byte, and with the place of any word of eight
    bytes; made on the device that has the bytes, at the speed of its memory.

    Each word is mixed with its place as SplitMix64 mixes its state, twice with other constants, and
    the results are summed, which a device may do in any order. No key is in it: who wants to can
    make two contents with the same numbers.
    """
    import torch

    nbytes = data.numel()
    padding = -nbytes % 8
    if padding or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(padding)])
    words = data.view(torch.int64)
    sums = [torch.zeros((), dtype=torch.int64, device=words.device) for _ in range(2)]
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS]
        places = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        for turn, (first, second) in enumerate((_MIX[:2], _MIX[2:])):
            mixed = part ^ (places * first)
            for factor in (second, first):
                mixed = (mixed ^ (mixed >> 29)) * factor
            sums[turn] = sums[turn] + (mixed ^ (mixed >> 32)).sum()
    low, high = (int(total) % (1 << 64) for total in sums)
    return low, (high + nbytes) % (1 << 64)


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
