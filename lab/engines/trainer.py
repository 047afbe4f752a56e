"""A trainer: it pushes weights to a running engine, by vLLM's own way for that."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.engines.node import Node

BACKEND = "folder"
"""The backend of weight transfer that :mod:`lab.engines.folder_transfer` is."""

LIVE: dict[str, Any] = {"worker_extension_cls": "lab.engines.folder_transfer.Worker"}
"""Options of an engine whose tensors are what computes, as on a GPU. Its workers have the methods
of :class:`lab.engines.folder_transfer.Worker`."""

PUSHED: dict[str, Any] = LIVE | {"weight_transfer_config": {"backend": BACKEND}}
"""Options of an engine that a trainer can push weights to."""


def push(
    node: Node,
    model: Path,
    *,
    name: str | None = None,
    chunks: int = 3,
    in_place: bool = False,
    connect: bool = True,
    between: Callable[[], object] = lambda: None,
) -> None:
    """Updates an engine to the weights of a folder, in so many calls, and says then what their
    `name` is.

    `between` is called after the start and after every chunk. The engine has to be paused, or to
    be at rest, if the tensors are not changed `in_place`. A trainer connects once: without
    `connect` it has done so, and `in_place` is as it was then.
    """
    if connect:
        node.call("init_weight_transfer_engine", init_info={"in_place": in_place})
    node.call("start_weight_update")
    between()
    names = tensors(model)
    for number in range(chunks):
        told = {"folder": str(model), "names": names[number::chunks]}
        node.call("update_weights", update_info=told)
        between()
    node.call("finish_weight_update")
    if name is not None:
        node.set_weight_version(name)


def tensors(model: Path) -> list[str]:
    """The names of the tensors in a folder's files."""
    found: set[str] = set()
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            found |= json.loads(file.read(length)).keys() - {"__metadata__"}
    return sorted(found)
