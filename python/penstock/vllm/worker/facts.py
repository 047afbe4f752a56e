"""The facts that the worker half needs about the engine that it serves, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from penstock._native import TensorView
from penstock.vllm.adapters import Adapter
from penstock.vllm.groups import Group, Groups, heads_of_rank
from penstock.vllm.worker.weights import Read


@dataclass(frozen=True)
class WorkerFacts:
    """The facts in vLLM's configuration about the engine and this rank."""

    groups: Groups
    num_blocks: int
    """Blocks of each group's table."""
    layers: int
    """Layers of the whole model."""
    heads: int
    """KV heads of the whole model."""
    stages: Sequence[tuple[int, int]]
    """The layers of each pipeline stage, as half-open ranges."""
    tensor_ranks: int
    """Tensor-parallel ranks of each stage."""
    tokens_per_step: int
    """The most tokens that a step computes."""
    requests_per_step: int
    """The most requests that a step computes."""
    tensor_rank: int = 0
    """This rank's number among the stage's tensor-parallel ranks."""
    backends: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By a group's position: vLLM's names for the attention backends of its layers here."""
    has_noisy_inputs: bool = False
    """Whether what goes into the first layer differs by more than rounding from engine to engine:
    where an encoder makes some of it from images or sounds, or where kernels may quantize it."""
    routes: bool = False
    """Whether the model routes tokens to experts."""

    @property
    def ranks(self) -> int:
        """The engine's ranks, of all pipeline stages."""
        return len(self.stages) * self.tensor_ranks

    @property
    def own_heads(self) -> tuple[int, int]:
        """The KV heads of the model that this rank holds, as a half-open range."""
        return heads_of_rank(self.heads, self.tensor_ranks, self.tensor_rank)

    def heads_of(self, group: Group) -> tuple[int, int]:
        """The heads of a group that this rank holds, as a half-open range."""
        return group.heads_of_rank(self.heads, self.tensor_ranks, self.tensor_rank)

    def replica_of(self, group: Group) -> tuple[int, int]:
        """This rank's number among the ranks that hold the same part of a group, and the number of
        such ranks."""
        return group.replica_of_rank(self.heads, self.tensor_ranks, self.tensor_rank)


@dataclass(frozen=True)
class KvMemory:
    """The registered KV cache."""

    views: Sequence[Sequence[TensorView]]
    """By group: the views of this rank's layers."""
    cuda_device: int | None = None
    """The ordinal of the CUDA device that holds the memory; None for host memory."""
    owners: Sequence[object] = ()
    """The tensors that the memory belongs to: as long as one of them lives, its memory does."""


def _nothing_to_do(on: bool) -> None:
    """Does nothing: no process waits for messages here."""


def _no_stream(device: int) -> int:
    raise NotImplementedError(f"no stream of CUDA device {device} is known")


@dataclass(frozen=True)
class Services:
    """The services that the worker half needs from its process. The defaults are for host memory,
    without adapters."""

    current_stream: Callable[[int], int] = _no_stream
    """CUDA device → the handle of the stream on which this thread gives the device its work."""
    engine_cores: Callable[[], AbstractContextManager[None]] = nullcontext
    """Threads started inside this context may run on all cores that are meant for the engine."""
    rest: Callable[[bool], None] = _nothing_to_do
    """Given True, makes this process sleep between messages."""
    agrees: Callable[[Adapter], bool] = lambda adapter: True
    """Whether this rank computes with the same content as the adapter in the block hashes."""
    read_weights: Read = lambda reading: None
    """Reads this rank's weights as they are in memory."""
