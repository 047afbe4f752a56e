"""The fleet to simulate, and the results of a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from penstock._native import Trace, policies, routings

POLICIES = tuple(policies())
"""The names of all eviction policies."""

ROUTINGS = tuple(routings())
"""The names of all ways to route requests."""


@dataclass(frozen=True)
class Tier:
    """A cache of a fleet, and how fast one node reads it."""

    nbytes: int
    """Bytes that the cache holds; 0 if there is no such cache."""
    policy: str
    bandwidth: float
    """Bytes per second."""
    latency: float
    """Seconds before the first byte."""


@dataclass(frozen=True)
class Engine:
    """The settings of each node's engine that matter for loads. The defaults are those of vLLM and
    of the connector."""

    load_policy: str = "auto"
    """When to load blocks that can be loaded: `auto`, `always` or `never`. With `auto`, a node
    loads where it expects this to be faster than recomputing, by the times that its own steps and
    loads took."""
    tokens_per_step: int = 8192
    """The most prompt tokens of a step: vLLM's `max_num_batched_tokens`, with its value for servers
    on large GPUs."""
    get_lanes: int = 2
    """Blocks of a load that are fetched at a time. The default is that of a rank with few cores."""
    lookup_timeout: float = 0.25
    """Seconds after which a look-up counts as a miss."""
    load_timeout: float = 0.5
    """Seconds that every load may take; `load_floor` adds to it by size."""
    load_floor: float = 64 << 20
    """Bytes per second below which a load is given up."""


@dataclass(frozen=True)
class Fleet:
    """Nodes, each with a cache of its own, and a pool that they share."""

    nodes: int
    host: Tier
    pool: Tier
    bytes_per_token: int
    """Bytes of one token's KV, all layers, all ranks of a node together."""
    prefill_speed: float
    """Prompt tokens that a node computes per second."""
    routing: str = "random"
    windows: int = 1
    """Number of equal parts of the trace's duration that are counted separately."""
    engine: Engine = Engine()


@dataclass(frozen=True)
class Tiers:
    """Which tiers a fleet has."""

    has_host: bool
    """Whether nodes have their own caches, of the fleet's size."""
    pool_bytes: int
    """Bytes that the pool holds; 0 for none."""

    @classmethod
    def of(cls, fleet: Fleet) -> Tiers:
        """The fleet's own tiers."""
        return cls(fleet.host.nbytes > 0, fleet.pool.nbytes)


@dataclass(frozen=True)
class Sums:
    """Sums over requests. A load takes a prompt's blocks in a row from the first one, or none."""

    requests: int
    input_tokens: int
    blocks: int
    host_blocks: int
    """Blocks loaded from the node's own cache."""
    pool_blocks: int
    """Blocks loaded from the pool; they follow the prompt's blocks from the node's own cache."""
    computed_tokens: int
    read_bytes: int
    """Bytes that all nodes read from the pool, to load them or to measure it."""
    written_bytes: int
    """Bytes that all nodes wrote to the pool."""
    pool_readers: int
    """Requests for which the pool was read."""
    pool_writers: int
    """Requests for which the pool was written to."""

    @property
    def hit_ratio(self) -> float:
        """Share of the prompts' blocks that were loaded."""
        return (self.host_blocks + self.pool_blocks) / max(1, self.blocks)


@dataclass(frozen=True)
class Outcome:
    """The results of a replay."""

    total: Sums
    windows: Sequence[Sums]
    ttft: Mapping[float, float]
    """Share of requests → seconds to the first token that this share does not exceed.

    The time is the sum of the look-up, if the request waits for it, the load, also a load that
    brings nothing, and the computation. It has no time in a queue."""
    busiest_node: int
    """Requests of the node that had the most requests."""
    host_blocks_held: int
    pool_blocks_held: int


def replay(trace: Trace, fleet: Fleet, progress: Callable[[int], None] | None = None) -> Outcome:
    """Replays a trace over a fleet. Each node loads or recomputes by the same rule as an engine.

    `progress` is called with the number of requests that are done.

    Raises:
        ConfigError: the fleet makes no sense.
    """
    (found,) = compare(trace, fleet, [Tiers.of(fleet)], progress)
    return found


def compare(
    trace: Trace,
    fleet: Fleet,
    tiers: Sequence[Tiers],
    progress: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Replays a trace once, over fleets that differ in their `tiers` alone: an outcome for each.

    The outcomes are those of replays one by one, in a fraction of the time.

    Raises:
        ConfigError: the fleet makes no sense.
    """
    found = trace.replay(
        nodes=fleet.nodes,
        host_bytes=fleet.host.nbytes,
        tiers=[(each.has_host, each.pool_bytes) for each in tiers],
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
    return [
        Outcome(
            total=Sums(**each["total"]),
            windows=[Sums(**window) for window in each["windows"]],
            ttft=each["ttft"],
            busiest_node=each["busiest_node"],
            host_blocks_held=each["host_blocks_held"],
            pool_blocks_held=each["pool_blocks_held"],
        )
        for each in found
    ]
