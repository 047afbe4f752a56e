"""The headers of safetensors files: the tensors of a file and their places. Reads no tensor.

A file begins with the length of its header (8 bytes, little endian), followed by the header. The
header is JSON that gives each tensor's type, shape and place. The format's own library does not
give places, and `penstock plan` must work without vLLM's dependencies.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

_MAX_HEADER = 100 << 20
"""The limit of the format's own library."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file."""

    dtype: str
    """The type's name in the format: F32, BF16, U8, …"""
    shape: tuple[int, ...]
    begin: int
    end: int
    """End of the tensor's bytes, which lie from `begin` on. Both count from the start of the file's
    data."""


@dataclass(frozen=True)
class Header:
    """The tensors of a file, and where their data begins."""

    tensors: dict[str, Tensor]
    data: int
    """Offset in the file at which its data begins."""


def read_header(path: Path) -> Header:
    """The header of a file.

    Raises:
        ConfigError: the file cannot be read, or it is not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER, size - 8):
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            header: dict[str, Any] = json.loads(file.read(length))
        tensors = {name: _tensor(v) for name, v in header.items() if name != "__metadata__"}
        return Header(tensors, data=8 + length)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{path}: not a safetensors file: {error!r}") from None


def _tensor(entry: dict[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(f"a tensor from {begin} to {end}")
    return Tensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), begin, end)
