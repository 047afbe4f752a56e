"""What is simulated, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from penstock._native import Trace

POLICIES = ("lru", "lru-by-block", "clock", "s3fifo", "prefix")
"""Eviction policies, by the names that the native part knows."""

ROUTINGS = ("random", "sticky", "prefix-aware")
"""Ways to route requests, by the names that the native part knows."""


@dataclass(frozen=True)
class Tier:
    """A cache of a fleet, and how fast one node reads it."""

    nbytes: int
    """Bytes that it holds; 0 if there is none."""
    policy: str
    bandwidth: float
    """Bytes a second."""
    latency: float
    """Seconds before the first byte."""


@dataclass(frozen=True)
class Engine:
    """What each node's engine is set to, as far as loads depend on it: as vLLM and the connector
    are set if nothing is said."""

    load_policy: str = "auto"
    """Whether to load what can be loaded: `auto`, where it is expected to be faster than
    recomputing, by what this node's steps and loads took; `always`; or `never`."""
    tokens_per_step: int = 8192
    """Of prompts, at most; vLLM's `max_num_batched_tokens` for servers on large GPUs."""
    get_lanes: int = 2
    """Blocks of a load that are fetched at a time."""
    lookup_timeout: float = 0.25
    """Seconds after which a look-up counts as a miss."""
    load_timeout: float = 0.5
    """Seconds a load may take at least; `load_floor` adds to it by size."""
    load_floor: float = 64 << 20
    """Bytes per second below which a load is given up."""


@dataclass(frozen=True)
class Fleet:
    """Nodes, each with a cache of its own, and a pool that they share."""

    nodes: int
    host: Tier
    pool: Tier
    bytes_per_token: int
    """KV of one token, all layers, all ranks of a node together."""
    prefill_speed: float
    """Tokens that a node computes a second."""
    routing: str = "random"
    windows: int = 1
    """Parts of the trace's duration that are counted one by one."""
    engine: Engine = Engine()


@dataclass(frozen=True)
class Sums:
    """Sums over requests. Blocks are loaded in a row from the first of a prompt, or not at all."""

    requests: int
    input_tokens: int
    blocks: int
    host_blocks: int
    """Blocks loaded from the node's own cache."""
    pool_blocks: int
    """Blocks loaded from the pool, behind those."""
    computed_tokens: int
    read_bytes: int
    """Bytes that all nodes read from the pool, to load them or to measure it."""
    written_bytes: int
    """Bytes that all nodes wrote to the pool."""

    @property
    def hit_ratio(self) -> float:
        """Share of the prompts' blocks that were loaded."""
        return (self.host_blocks + self.pool_blocks) / max(1, self.blocks)


@dataclass(frozen=True)
class Outcome:
    """What a replay found."""

    total: Sums
    windows: Sequence[Sums]
    ttft: Mapping[float, float]
    """Seconds to the first token that this share of requests does not exceed: the look-up, if it is
    waited for, what is loaded, or waited for in vain, and what is computed. No queue is in it."""
    busiest_node: int
    """Requests of the node that had the most."""
    host_blocks_held: int
    pool_blocks_held: int


def replay(trace: Trace, fleet: Fleet, progress: Callable[[int], None] | None = None) -> Outcome:
    """Replays a trace over a fleet, each node of which loads or recomputes by the rule that engines
    follow; `progress` is told how many requests are done.

    Raises:
        ConfigError: the fleet makes no sense.
    """
    found = trace.replay(
        nodes=fleet.nodes,
        host_bytes=fleet.host.nbytes,
        pool_bytes=fleet.pool.nbytes,
        bytes_per_token=fleet.bytes_per_token,
        policy=fleet.host.policy,
        pool_policy=fleet.pool.policy,
        routing=fleet.routing,
        prefill_speed=fleet.prefill_speed,
        host_speed=(fleet.host.bandwidth, fleet.host.latency),
        pool_speed=(fleet.pool.bandwidth, fleet.pool.latency),
        **asdict(fleet.engine),
        windows=fleet.windows,
        progress=progress,
    )
    return Outcome(
        total=Sums(**found["total"]),
        windows=[Sums(**window) for window in found["windows"]],
        ttft=found["ttft"],
        busiest_node=found["busiest_node"],
        host_blocks_held=found["host_blocks_held"],
        pool_blocks_held=found["pool_blocks_held"],
    )
