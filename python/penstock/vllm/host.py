"""The host tier: how host memory is split over the ranks, and node memory in its place.

A block has a part on every rank, in slots of one size. Each rank gets host memory in proportion to
its part of a block, as with the KV memory itself. So all ranks hold the same number of blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock._native import Store, slot_stride
from penstock.errors import ConfigError
from penstock.layout import objects
from penstock.layout.geometry import Geometry
from penstock.plan.split import proportional

LEAST_BYTES = 1 << 30
"""The least host memory by default, however little a step stores."""

LEAST_ON_THE_WAY = 128 << 20
"""The least host memory by default, where blocks stay in node memory."""

_DESCRIBE_SECONDS = 10.0

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Slots:
    """The slots of host memory that one rank needs for a block."""

    per_block: int
    """Slots that a block takes; 0 on a rank that holds no part of it."""
    payload_bytes: int
    """Bytes of the largest object."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of host memory that a block takes."""
        return self.per_block * slot_stride(self.payload_bytes)


def stage_slots(
    stage: tuple[int, int], heads: tuple[int, int], layer_bytes: int, geometry: Geometry
) -> Slots:
    """The slots that a rank needs for a block, from the layers of its stage and its KV heads.

    `layer_bytes` is the bytes of one layer's part of a block with these heads.

    >>> stage_slots((0, 6), (0, 8), 1000, Geometry(2, 4, None))
    Slots(per_block=6, payload_bytes=1000)
    """
    if stage[0] == stage[1]:
        return Slots(0, 0)
    spans = objects(
        (*stage, *heads), layers_per_object=geometry.layers, heads_per_object=geometry.heads
    )
    largest = max((end - start) * (last - first) for start, end, first, last in spans)
    return Slots(len(spans), largest * layer_bytes // (heads[1] - heads[0]))


def step_blocks(tokens: int, block_sizes: Iterable[int]) -> int:
    """Blocks of all groups that a step of `tokens` fills, for prompts one after the other.

    `block_sizes` are the tokens of a block, by group.

    >>> step_blocks(8192, [16])
    512
    """
    return sum(-(-tokens // size) for size in block_sizes)


def default_host_bytes(
    step_bytes: int, machine_bytes: int, *, least_bytes: int = LEAST_BYTES
) -> int:
    """Bytes of host memory if the operator names none. `step_bytes` is the most that the stores of
    a step take.

    While the stores of one step are on their way to the pool, those of the next step come. Stores
    may use three quarters of the host memory. So the default is twice `step_bytes`, but at most a
    quarter of the machine's memory, and in any case at least `least_bytes`.

    >>> default_host_bytes(2 << 30, 512 << 30) >> 30
    4
    >>> default_host_bytes(2 << 30, 8 << 30) >> 30
    2
    """
    return max(least_bytes, min(2 * step_bytes, machine_bytes // 4))


def machine_bytes() -> int:
    """Bytes of this machine's memory, or the bytes that its container may use."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def host_blocks(host_bytes: int, ranks: Sequence[Slots]) -> int:
    """Blocks that the host memory of all ranks together holds. The split over ranks follows the
    rule for KV memory.

    >>> host_blocks(1 << 20, [Slots(6, 8000), Slots(2, 8000)])
    16

    Raises:
        ConfigError: the memory does not hold one block.
    """
    need = [rank.bytes_per_block for rank in ranks]
    if host_bytes < sum(need):
        raise ConfigError(
            f"{host_bytes:,} bytes of host memory do not hold one block, which takes "
            f"{', '.join(f'{part:,}' for part in need)} bytes on the ranks: raise --host-bytes "
            "(penstock.host_bytes)"
        )
    return proportional(need, host_bytes).blocks


def open_node_memory(url: str, client_name: str) -> Store | None:
    """The host tier that the engines of this machine share, by the URL of its shared memory. None
    if the URL is empty.

    Raises:
        StoreError: the machine does not have that much shared memory, or it is another user's.
        ConfigError: the URL is wrong, or the memory is there with another size.
    """
    return Store.open(url, client_name=client_name) if url else None


def node_bytes(node: Store | None) -> int:
    """Bytes that node memory holds; 0 without any."""
    return 0 if node is None else int(node.describe(timeout=_DESCRIBE_SECONDS)["capacity_bytes"])
