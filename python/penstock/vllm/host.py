"""How the engine's host memory is split over its ranks.

A block has a part on every rank, in slots of one size. As with the KV memory itself, each rank gets
as much as its part of a block takes, so that all of them hold the same number of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.layout import objects
from penstock.layout.geometry import Geometry
from penstock.plan.split import proportional

HEADER_BYTES = 128
"""Room for a value's header, encrypted or not, in front of the payload in every slot."""

PAGE_BYTES = 4096
"""Slots begin on pages of host memory."""


@dataclass(frozen=True)
class Slots:
    """What one rank holds of every block."""

    per_block: int
    """Slots that a block takes; 0 on a rank that holds nothing of it."""
    payload_bytes: int
    """Of the largest object."""

    @property
    def bytes_per_block(self) -> int:
        """Host memory that a block takes."""
        slot = self.payload_bytes + HEADER_BYTES
        return self.per_block * (-(-slot // PAGE_BYTES) * PAGE_BYTES)


def stage_slots(
    stage: tuple[int, int], heads: tuple[int, int], layer_bytes: int, geometry: Geometry
) -> Slots:
    """What a rank holds of a block, by the layers of its stage and its KV heads.

    `layer_bytes` is one layer's part of a block with those heads.

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


def host_blocks(host_bytes: int, ranks: Sequence[Slots]) -> int:
    """Blocks that the host memory of all ranks together holds, by the rule that splits KV memory.

    >>> host_blocks(1 << 20, [Slots(6, 8000), Slots(2, 8000)])
    16

    Raises:
        ConfigError: it does not hold one.
    """
    need = [rank.bytes_per_block for rank in ranks]
    if host_bytes < sum(need):
        raise ConfigError(
            f"{host_bytes:,} bytes of host memory do not hold one block, which takes "
            f"{', '.join(f'{part:,}' for part in need)} bytes on the ranks: raise --host-bytes "
            "(penstock.host_bytes)"
        )
    return proportional(need, host_bytes).blocks
