"""Payloads that an engine stored, by their keys without namespaces: in a file, with an index."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benches.witness.statistic import WIDTHS, Array
from penstock._native import Store
from penstock.pool.namespace import DESCRIPTIONS, DIGEST_BYTES, read_description

HEADER = 64
TIMEOUT = 30.0
STATE = "mamba"
"""Layers that keep a state, whole."""


class Payload(NamedTuple):
    """Where a payload lies in the file, and what it holds."""

    start: int
    size: int
    kind: str
    """Of its group's layers: `full_attention`, `mamba`, and so on."""
    element: str
    """Element type: `mixed` if it has several."""
    rows: int
    """Its parts of equal size: of a token and a head each where layers attend."""
    layers: int
    is_first: bool
    """Whether it begins with the model's first layer."""

    @property
    def is_numeric(self) -> bool:
        """Whether it is of numbers of one type."""
        return self.element in WIDTHS


class Payloads:
    """Payloads in a folder: `payloads.bin` has them one after the other, `index.json` says where.

    A name is the group's index, the chunk's hash and the span: the key with the group in place of
    the namespace. So KV of other weights has the same name.
    """

    def __init__(self, folder: Path, block: int) -> None:
        listed = json.loads((folder / "index.json").read_text())
        has_one_group = len({name.partition(":")[0] for name, *_ in listed}) == 1
        self.index: dict[str, Payload] = {}
        for name, start, size, kind, element, rows in listed:
            layers = 1 if kind == STATE else max(1, rows // (block * heads(name)))
            self.index[name] = Payload(start, size, kind, element, rows, layers, has_one_group)
        self._data = np.memmap(folder / "payloads.bin", np.uint8, "r")

    def __getitem__(self, name: str) -> Array:
        where = self.index[name]
        return self._data[where.start : where.start + where.size]

    def common(self, other: Payloads) -> Iterator[tuple[str, Payload, Array, Array]]:
        """Names that both have, what they hold, and the payloads."""
        for name, where in self.index.items():
            if name in other.index and other.index[name].size == where.size:
                yield name, where, self[name], other[name]


def heads(name: str) -> int:
    """KV heads of a payload, from its span."""
    first, end = struct.unpack("<2H", bytes.fromhex(name.partition(":")[2])[-4:])
    return int(end - first)


def read(url: str, folder: Path, block: int) -> Payloads:
    """Copies the payloads of a pool into a folder. Blocks have so many tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    store = Store.open(url)
    index: list[tuple[Any, ...]] = []
    at = 0
    with (folder / "payloads.bin").open("wb") as file:
        for namespace, *_ in store.usage(timeout=TIMEOUT):
            if namespace == DESCRIPTIONS:
                continue
            said = read_description(store, namespace, timeout=TIMEOUT)
            assert said is not None
            group, element = said["group"], element_of(said)
            for key, nbytes in sorted(store.list(namespace, timeout=TIMEOUT)):
                payload = bytearray(nbytes - HEADER)
                assert store.get(key, payload, timeout=TIMEOUT) == len(payload)
                file.write(payload)
                name = f"{group['index']}:{key[DIGEST_BYTES:].hex()}"
                rows = len(payload) // said["content_bytes"]
                index.append((name, at, len(payload), group["kind"], element, rows))
                at += len(payload)
    (folder / "index.json").write_text(json.dumps(index))
    return Payloads(folder, block)


def element_of(said: dict[str, Any]) -> str:
    """The element type of a namespace's payloads."""
    if said["kv_cache_dtype"].startswith("fp8"):
        return str(said["kv_cache_dtype"])
    types = {ELEMENTS.get(each, "mixed") for each in said["kv_dtype"].split(",")}
    return types.pop() if len(types) == 1 else "mixed"


ELEMENTS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
