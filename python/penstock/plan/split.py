"""How the KV memory of a pipeline is split over its ranks, in bytes and blocks.

A block has a part on every rank, so the rank with the fewest blocks decides for all. The bytes that
a rank needs for a block follow from its share of the model's layers. But vLLM gives every rank the
same bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError


@dataclass(frozen=True)
class Split:
    """The number of blocks that a pipeline holds, and each rank's bytes."""

    blocks: int
    given: tuple[int, ...]
    """Bytes set aside for KV, by rank."""
    used: tuple[int, ...]
    """Bytes of `given` that blocks take, by rank."""

    @property
    def idle(self) -> tuple[int, ...]:
        """Bytes that no block can take, by rank."""
        return tuple(given - used for given, used in zip(self.given, self.used, strict=True))


@dataclass(frozen=True)
class Room:
    """The bytes that a device really has free. Ranks with the same `device` share them."""

    device: Hashable
    free: int


def uniform(block_bytes: Sequence[int], given: Sequence[int]) -> Split:
    """The split when every rank has fixed bytes of its own, as in vLLM.

    Args:
        block_bytes: bytes of a block on each rank; 0 where a rank has no layer with KV.
        given: bytes set aside on each rank.

    Returns:
        The split. It has no blocks if some rank cannot hold one.

    Raises:
        ConfigError: no rank has a layer with KV.
    """
    _check(block_bytes)
    blocks = min(have // need for need, have in zip(block_bytes, given, strict=True) if need)
    return Split(blocks, tuple(given), tuple(blocks * need for need in block_bytes))


def proportional(
    block_bytes: Sequence[int], total: int, rooms: Sequence[Room] | None = None
) -> Split:
    """The pipeline's bytes, in proportion to the bytes of a block on each rank, so that none idle.

    Args:
        block_bytes: bytes of a block on each rank; 0 where a rank has no layer with KV.
        total: bytes for all ranks together.
        rooms: the free bytes of each rank's device. If a proportional share is larger than that,
            all ranks get fewer blocks.

    Raises:
        ConfigError: no rank has a layer with KV, or there is no room for a block.
    """
    _check(block_bytes)
    blocks = total // sum(block_bytes)
    if rooms:
        blocks = min(blocks, _fitting(block_bytes, rooms))
    if blocks < 1:
        free = f", the devices {', '.join(f'{room.free:,}' for room in rooms)}" if rooms else ""
        raise ConfigError(
            f"no room for one block of KV: it takes {', '.join(f'{n:,}' for n in block_bytes)} "
            f"bytes on the ranks; there are {total:,} in all{free}"
        )
    return of_blocks(block_bytes, blocks)


def of_blocks(block_bytes: Sequence[int], blocks: int) -> Split:
    """The split with exactly the bytes that this number of blocks takes on each rank."""
    used = tuple(blocks * need for need in block_bytes)
    return Split(blocks, used, used)


def check_rooms(split: Split, rooms: Sequence[Room]) -> None:
    """Refuses a split that does not fit.

    Raises:
        ConfigError: some ranks need more than their device has free. The message names the ranks
            and both numbers.
    """
    for device in dict.fromkeys(room.device for room in rooms):
        ranks = [rank for rank, room in enumerate(rooms) if room.device == device]
        need = sum(split.given[rank] for rank in ranks)
        free = min(rooms[rank].free for rank in ranks)
        if need > free:
            raise ConfigError(
                f"rank {', '.join(map(str, ranks))} needs {need:,} bytes for {split.blocks:,} "
                f"blocks of KV, and its device has {free:,} free: ask for fewer tokens or less "
                "memory, or give the rank fewer layers"
            )


def _fitting(block_bytes: Sequence[int], rooms: Sequence[Room]) -> int:
    """The most blocks that fit on every device."""
    found = []
    for device in {room.device for room in rooms}:
        ranks = [rank for rank, room in enumerate(rooms) if room.device == device]
        if need := sum(block_bytes[rank] for rank in ranks):
            found.append(min(rooms[rank].free for rank in ranks) // need)
    return min(found)


def _check(block_bytes: Sequence[int]) -> None:
    if not any(block_bytes):
        raise ConfigError("no rank has a layer that keeps KV: there is nothing to plan")
