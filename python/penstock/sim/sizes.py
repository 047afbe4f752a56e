"""The size of a pool: its bytes, its servers and its network traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock._native import Trace
from penstock.sim.fleet import Fleet, Outcome, Tiers, compare

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Pool sizes to try, as shares of all different blocks of the trace."""


@dataclass(frozen=True)
class Size:
    """A pool of one size, with its results under the trace."""

    nbytes: int
    hit_ratio: float
    computed_tokens: int
    """Prompt tokens that all nodes compute."""
    ttft: Mapping[float, float]
    """Share of requests → seconds to the first token, see `Outcome.ttft`."""
    servers: int
    read_bytes: int
    written_bytes: int
    read_rate: float
    """Bytes per second that all nodes read, in the window with the most traffic."""
    write_rate: float
    """Bytes per second that all nodes write, in the same window."""


@dataclass(frozen=True)
class Sizes:
    """Pools of several sizes. The largest one holds all blocks of the trace."""

    tried: Sequence[Size]
    enough: Size
    """The smallest tried size whose hit ratio is at least `share` of the largest one's."""
    share: float


def tried_sizes(trace: Trace, fleet: Fleet) -> list[int]:
    """The pool sizes that `size_pool` tries, in bytes, the smallest first."""
    block_bytes = trace.block_tokens * fleet.bytes_per_token
    blocks = sorted({max(1, round(trace.unique_blocks * part)) for part in SHARES})
    return [count * block_bytes for count in blocks]


def size_pool(
    trace: Trace,
    fleet: Fleet,
    *,
    server_bytes: int,
    share: float = 0.95,
    progress: Callable[[int], None] | None = None,
) -> Sizes:
    """Tries pools of several sizes. In front of each pool, the nodes keep the fleet's own caches.

    `server_bytes` is the size of one server of the pool. Rates are means over one of the fleet's
    windows, so the peak is higher if the windows are shorter.

    Raises:
        ConfigError: the fleet makes no sense.
    """
    sizes = tried_sizes(trace, fleet)
    has_host = fleet.host.nbytes > 0
    outcomes = compare(trace, fleet, [Tiers(has_host, nbytes) for nbytes in sizes], progress)
    return weigh_sizes(trace, fleet, dict(zip(sizes, outcomes, strict=True)), server_bytes, share)


def weigh_sizes(
    trace: Trace,
    fleet: Fleet,
    outcomes: Mapping[int, Outcome],
    server_bytes: int,
    share: float = 0.95,
) -> Sizes:
    """What the outcomes of pools of several sizes in bytes, the smallest first, mean for servers
    and for the network."""
    window = max(trace.duration, 1e-6) / fleet.windows

    def size(nbytes: int, outcome: Outcome) -> Size:
        peak = max(outcome.windows, key=lambda sums: sums.read_bytes + sums.written_bytes)
        return Size(
            nbytes=nbytes,
            hit_ratio=outcome.total.hit_ratio,
            computed_tokens=outcome.total.computed_tokens,
            ttft=outcome.ttft,
            servers=math.ceil(nbytes / server_bytes),
            read_bytes=outcome.total.read_bytes,
            written_bytes=outcome.total.written_bytes,
            read_rate=peak.read_bytes / window,
            write_rate=peak.written_bytes / window,
        )

    tried = [size(nbytes, outcome) for nbytes, outcome in outcomes.items()]
    target = share * tried[-1].hit_ratio
    enough = next(each for each in tried if each.hit_ratio >= target)
    return Sizes(tried, enough, share)
