"""vLLM's KV events as bytes. All versions in use write the same fields that are read here."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Hash = Annotated[int, msgspec.Meta(ge=0)] | bytes
"""A block's hash. A number has 64 bits: MessagePack knows no larger ones."""


class _Event(msgspec.Struct, tag=True):
    """An event. What it has beside the fields named here is not read."""


class BlockStored(_Event):
    """Blocks of a group are there."""

    kind: ClassVar = "stored"

    block_hashes: list[_Hash]
    block_size: _Number
    medium: str | None = None
    group_idx: _Number | None = None


class BlockRemoved(_Event):
    """Blocks of a group are there no more."""

    kind: ClassVar = "removed"

    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: _Number | None = None


class AllBlocksCleared(_Event):
    """The engine's own cache is empty."""

    kind: ClassVar = "cleared"


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True):
    """The events of a step. What follows them is not read."""

    time: float
    events: list[Event]


class Decoder:
    """Reads batches of events."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(_Batch)

    def events(self, payload: bytes) -> list[Event] | None:
        """The events of a batch; None if it cannot be read."""
        try:
            return self._decoder.decode(payload).events
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
