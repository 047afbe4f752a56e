"""Plans: how much KV a model holds over a pipeline, for each partition and each split."""

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
"""Bytes that a CUDA context, graphs and communication buffers take on a device. An estimate, since
drivers differ."""

_ACTIVATION_ROWS = 16
"""Activations alive at the peak of a forward pass, in multiples of batch times hidden size: a gated
feed-forward layer of the usual width (3.5 times hidden, twice), attention, and the residual. An
estimate."""


@dataclass(frozen=True)
class Plan:
    """One partition of a model, and how much its KV memory holds under each split."""

    partition: tuple[int, ...]
    stages: tuple[tuple[int, int], ...]
    token_bytes: tuple[int, ...]
    """Bytes of one token's KV, by rank."""
    block_bytes: tuple[int, ...]
    weights: tuple[int, ...]
    """Bytes of weights, by rank."""
    outcomes: tuple[Outcome, ...]

    @property
    def ranks(self) -> list[RankFacts]:
        """The facts about each rank that the tables show."""
        return [
            RankFacts(str(rank), f"{start}-{end - 1} ({end - start})", block, weights)
            for rank, ((start, end), block, weights) in enumerate(
                zip(self.stages, self.block_bytes, self.weights, strict=True)
            )
        ]


def reserve(model: Model, serving: Serving) -> int:
    """Estimated bytes of a device that neither weights nor KV can use."""
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
    """The plan for a partition: how many blocks and tokens it holds.

    Args:
        memory: bytes for KV on all pipeline ranks together, the same on each tensor-parallel rank.
            This is the meaning of `--kv-cache-memory-bytes` with `--enable-pp-prop-kv-cache`. The
            plan shows two splits: even, as in vLLM, and proportional.
        tokens: instead of `memory`, tokens to hold. The plan takes as much memory as they need.
        devices: the device of each rank. Without `memory` and `tokens`, KV takes the memory that
            the weights leave.

    Raises:
        ConfigError: the sizes do not fit; the message has the numbers.
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
