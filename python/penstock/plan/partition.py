"""The best way to cut a model into pipeline stages, for devices of given sizes and speeds.

A stage is a run of consecutive layers. So the best cut of the first `n` layers into `r` stages
extends the best cut of fewer layers into `r - 1` stages. Dynamic programming over these cuts is
exact; `tests/plan` compares its results with all possible partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.plan.kv import KvSizes
from penstock.plan.model import Model

_NEVER = -1
"""Blocks of a stage whose weights do not fit its device."""
_ENDLESS = 1 << 62
"""Blocks of a stage without KV."""


@dataclass(frozen=True)
class Device:
    """The device that one rank of a pipeline stage computes on."""

    budget: int
    """Bytes for weights and KV: the device's memory less activations and the runtime."""
    speed: float = 1.0
    """Layers per unit of time, relative to the other devices."""


@dataclass(frozen=True)
class Partition:
    """A cut of the model into stages, with its KV blocks and its slowest stage."""

    layers: tuple[int, ...]
    """Number of layers of each stage."""
    blocks: int
    """Blocks of KV that fit on the rank that holds the fewest."""
    slowest: float
    """Time that the slowest stage takes for its layers."""


class Planner:
    """Partitions of one model over a row of devices."""

    def __init__(
        self, model: Model, sizes: KvSizes, devices: Sequence[Device], tp: int = 1
    ) -> None:
        """
        Args:
            tp: tensor-parallel ranks of each stage; weights are spread over them.

        Raises:
            ConfigError: there are more devices than layers.
        """
        count = len(model.layers)
        if not 1 <= len(devices) <= count:
            raise ConfigError(f"{count} layers cannot be spread over {len(devices)} ranks")
        for device in devices:
            if not device.speed > 0:
                raise ConfigError(f"a device of speed {device.speed} never finishes")
        self._model, self._sizes, self._devices, self._tp = model, sizes, tuple(devices), tp
        self._count = count
        weights = [0]
        for layer in model.layers:
            weights.append(weights[-1] + layer.weight_bytes)
        outside = (model.embedding_bytes + model.head_bytes) * model.everywhere
        self._block_bytes = {
            (start, end): sizes.block_bytes(start, end)
            for start in range(count)
            for end in range(start + 1, count + 1)
        }
        # By rank, then by (start, end): blocks that the stage holds.
        self._blocks: list[dict[tuple[int, int], int]] = []
        last = len(devices) - 1
        for rank, device in enumerate(devices):
            found: dict[tuple[int, int], int] = {}
            ends = (count,) if rank == last else range(rank + 1, count - last + rank + 1)
            for end in ends:
                for start in range(rank, end) if rank else (0,):
                    held = weights[end] - weights[start] + outside
                    if not rank or rank == last:
                        held = model.weight_bytes(start, end)
                    room = device.budget - -(-held // tp)
                    need = self._block_bytes[start, end]
                    found[start, end] = (
                        _NEVER if room < 0 else _ENDLESS if not need else room // need
                    )
            self._blocks.append(found)

    def assess(self, layers: Sequence[int]) -> Partition:
        """The partition with these numbers of layers, with its blocks and its slowest stage.

        Raises:
            ConfigError: a stage's weights do not fit its device, with the numbers.
        """
        start, blocks, slowest = 0, _ENDLESS, 0.0
        for rank, number in enumerate(layers):
            end = start + number
            self._check_weights(rank, start, end)
            blocks = min(blocks, self._blocks[rank][start, end])
            slowest = max(slowest, self._time(rank, start, end))
            start = end
        return Partition(tuple(layers), blocks, slowest)

    def _check_weights(self, rank: int, start: int, end: int) -> None:
        need = -(-self._model.weight_bytes(start, end) // self._tp)
        budget = self._devices[rank].budget
        if need > budget:
            raise ConfigError(
                f"rank {rank}: the weights of {end - start} layers take {need:,} bytes, the "
                f"device has {budget:,} for weights and KV; give the rank fewer layers"
            )

    def best(self, slower_than: float | None = None) -> Partition | None:
        """The partition with the most blocks. Of several, the one whose slowest stage is fastest.

        Args:
            slower_than: if given, every stage must take less time than this.

        Returns:
            None if no partition's weights fit.
        """

        def held(rank: int, start: int, end: int) -> float | None:
            blocks = self._blocks[rank][start, end]
            late = slower_than is not None and self._time(rank, start, end) >= slower_than
            return None if late or blocks == _NEVER else -blocks

        roomiest = self._chain(held)
        if roomiest is None:
            return None
        least = self.assess(roomiest).blocks

        def time(rank: int, start: int, end: int) -> float | None:
            enough = self._blocks[rank][start, end] >= least
            return self._time(rank, start, end) if enough else None

        quickest = self._chain(time)
        assert quickest is not None
        return self.assess(quickest)

    def _time(self, rank: int, start: int, end: int) -> float:
        return (end - start) / self._devices[rank].speed

    def _chain(self, cost: Callable[[int, int, int], float | None]) -> list[int] | None:
        """The layers of each stage such that the highest cost of a stage is as low as possible.

        `cost` takes a rank and its range of layers, start and end. It returns None if the rank must
        not have this range."""
        reached: dict[int, tuple[float, list[int]]] = {0: (-_ENDLESS, [])}
        for rank, stages in enumerate(self._blocks):
            following: dict[int, tuple[float, list[int]]] = {}
            for start, end in stages:
                if start not in reached or (own := cost(rank, start, end)) is None:
                    continue
                before, layers = reached[start]
                dearest = max(before, own)
                if end not in following or dearest < following[end][0]:
                    following[end] = (dearest, [*layers, end - start])
            reached = following
        return reached[self._count][1] if self._count in reached else None

    def frontier(self) -> list[Partition]:
        """The partitions that no other partition beats in blocks and in speed together: no other
        has more blocks and a slowest stage that is at least as fast. The one with the most blocks
        is first."""
        found: list[Partition] = []
        limit: float | None = None
        while (partition := self.best(limit)) is not None:
            found.append(partition)
            limit = partition.slowest
        return found
