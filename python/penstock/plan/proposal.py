"""Plans: what a model holds over a pipeline, partition by partition and split by split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.plan import split
from penstock.plan.kv import KvSizes, Serving
from penstock.plan.model import Model, stages
from penstock.plan.partition import Device
from penstock.plan.split import Room, Split
from penstock.plan.table import Outcome, RankFacts

RUNTIME_BYTES = 1 << 30
"""Taken for what a CUDA context, graphs and communication buffers need on a device; an estimate,
as no two drivers agree."""

_ACTIVATION_ROWS = 16
"""Hidden states alive at the peak of a forward pass, in multiples of batch times hidden size: those
of a gated feed-forward layer of the usual width (3.5 times hidden, twice) and of attention beside
the residual. An estimate."""


@dataclass(frozen=True)
class Plan:
    """One partition of a model, and what its KV memory holds under each split."""

    partition: tuple[int, ...]
    stages: tuple[tuple[int, int], ...]
    token_bytes: tuple[int, ...]
    """KV of a token, by rank."""
    block_bytes: tuple[int, ...]
    weights: tuple[int, ...]
    """Bytes on each rank."""
    outcomes: tuple[Outcome, ...]

    @property
    def ranks(self) -> list[RankFacts]:
        """What the tables say of each rank."""
        return [
            RankFacts(str(rank), f"{start}-{end - 1} ({end - start})", block, weights)
            for rank, ((start, end), block, weights) in enumerate(
                zip(self.stages, self.block_bytes, self.weights, strict=True)
            )
        ]


def reserve(model: Model, serving: Serving) -> int:
    """Bytes of a device that neither weights nor KV can have, estimated."""
    activations = serving.batched_tokens * model.hidden * model.element_bytes * _ACTIVATION_ROWS
    return activations // serving.tp + RUNTIME_BYTES


def plan(
    model: Model,
    sizes: KvSizes,
    serving: Serving,
    partition: Sequence[int],
    *,
    memory: int | None = None,
    tokens: int | None = None,
    devices: Sequence[Device] | None = None,
) -> Plan:
    """What a partition holds.

    Args:
        memory: bytes for KV on all pipeline ranks together (each tensor-parallel rank alike), as
            `--kv-cache-memory-bytes` beside `--enable-pp-prop-kv-cache`: split evenly, as vLLM
            does, and in proportion.
        tokens: tokens to hold, instead: as much memory as they need.
        devices: what each rank computes on. Without `memory` and `tokens`, KV takes what the
            weights leave.

    Raises:
        ConfigError: sizes that do not fit, with the numbers.
    """
    cuts = stages(partition, len(model.layers))
    if devices is not None and len(devices) != len(cuts):
        raise ConfigError(f"{len(cuts)} ranks, and memory of {len(devices)} devices")
    block_bytes = tuple(sizes.block_bytes(*cut) for cut in cuts)
    weights = tuple(-(-model.weight_bytes(*cut) // serving.tp) for cut in cuts)
    rooms = None if devices is None else _rooms(devices, weights)
    found: list[tuple[str, Split]] = []
    if tokens is not None:
        blocks = sizes.blocks(tokens)
        exact = split.of_blocks(block_bytes, blocks)
        most = max(exact.given)
        found = [
            ("uniform", split.uniform(block_bytes, [most] * len(cuts))),
            ("proportional", exact),
        ]
        if rooms is not None:
            split.check_rooms(exact, rooms)
    elif memory is not None:
        found = [
            ("uniform", split.uniform(block_bytes, [memory // len(cuts)] * len(cuts))),
            ("proportional", split.proportional(block_bytes, memory, rooms)),
        ]
    elif rooms is not None:
        found = [("what is free", split.uniform(block_bytes, [room.free for room in rooms]))]
    outcomes = tuple(
        Outcome.of(name, each, block_bytes, sizes.request_blocks(), sizes.max_length)
        for name, each in found
    )
    return Plan(
        tuple(partition),
        tuple(cuts),
        tuple(sizes.token_bytes(*cut) for cut in cuts),
        block_bytes,
        weights,
        outcomes,
    )


def _rooms(devices: Sequence[Device], weights: Sequence[int]) -> list[Room]:
    rooms = []
    for rank, (device, held) in enumerate(zip(devices, weights, strict=True)):
        if held > device.budget:
            raise ConfigError(
                f"rank {rank}: its weights take {held:,} bytes, the device has {device.budget:,} "
                "for weights and KV: give the rank fewer layers or a larger device"
            )
        rooms.append(Room(rank, device.budget - held))
    return rooms
