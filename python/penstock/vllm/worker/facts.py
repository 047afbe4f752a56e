"""What the worker half needs to know of the engine that it serves, in plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from penstock.vllm.adapters import Adapter
from penstock.vllm.groups import Groups

View = tuple[int, int, Sequence[int], Sequence[int], int, int, int]
"""A layer's KV: its index in the whole model, address, shape and strides in elements, bytes of an
element, and address and bytes of the memory that it is a view of."""


@dataclass(frozen=True)
class WorkerFacts:
    """What vLLM's configuration says of the engine and of this rank."""

    groups: Groups
    num_blocks: int
    """Blocks of each group's table."""
    layers: int
    """Of the whole model."""
    heads: int
    """KV heads of the whole model."""
    stages: Sequence[tuple[int, int]]
    """The layers of each pipeline stage, as half-open ranges."""
    tensor_ranks: int
    """Ranks of each stage."""
    own_heads: tuple[int, int]
    """The KV heads that this rank holds, as a half-open range."""
    replica: tuple[int, int]
    """This rank's number among those that hold the same heads, and how many they are."""
    tokens_per_step: int
    """That a step computes at most."""
    requests_per_step: int
    """That a step computes at most."""
    continues_prefixes: bool = True
    """Whether the engine can compute several tokens after some that it has in its KV cache."""


@dataclass(frozen=True)
class KvMemory:
    """The registered KV cache."""

    views: Sequence[Sequence[View]]
    """By group, of the layers of this rank."""
    cuda_device: int | None = None
    """The ordinal of the device that it is on; None for host memory."""


def _nothing_to_do(on: bool) -> None:
    """Nobody waits beside this engine."""


def _no_stream(device: int) -> int:
    raise NotImplementedError(f"no stream of CUDA device {device} is known")


@dataclass(frozen=True)
class Services:
    """What the worker half asks of its surroundings. The defaults are for host memory, without
    adapters."""

    current_stream: Callable[[int], int] = _no_stream
    """The handle of the stream that this thread gives a CUDA device its work on."""
    engine_cores: Callable[[], AbstractContextManager[None]] = nullcontext
    """Threads started inside may run on all cores that are meant for the engine."""
    rest: Callable[[bool], None] = _nothing_to_do
    """Has this process sleep between messages, while true."""
    agrees: Callable[[Adapter], bool] = lambda adapter: True
    """Whether blocks named by an adapter are what this rank computes with it."""
