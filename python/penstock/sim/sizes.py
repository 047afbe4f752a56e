"""How large a pool, how many servers, how much network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock._native import Trace
from penstock.sim.fleet import Fleet, Sums, replay

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Sizes of a pool that are tried, as shares of all the trace's different blocks."""


@dataclass(frozen=True)
class Size:
    """A pool of one size under the trace."""

    nbytes: int
    hit_ratio: float
    servers: int
    read_rate: float
    """Bytes a second that all nodes read, in the window with the most traffic."""
    write_rate: float
    """Bytes a second that all nodes write, in the same window."""


@dataclass(frozen=True)
class Sizes:
    """Pools from small to one that holds everything."""

    tried: Sequence[Size]
    enough: Size
    """The smallest tried whose hits are `share` of what the largest finds."""
    share: float


def size_pool(
    trace: Trace,
    fleet: Fleet,
    *,
    server_bytes: int,
    share: float = 0.95,
    progress: Callable[[int], None] | None = None,
) -> Sizes:
    """Tries pools of several sizes, in front of which each node has the fleet's own cache.

    `server_bytes` is what one server of the pool holds. Rates are means over the fleet's windows,
    so the shorter a window, the higher the peak.

    Raises:
        ConfigError: the fleet makes no sense.
    """
    block_bytes = trace.block_tokens * fleet.bytes_per_token
    window = max(trace.duration, 1e-6) / fleet.windows

    def rate(sums: Sums) -> float:
        return (sums.read_bytes + sums.written_bytes) / window

    tried: list[Size] = []
    blocks = sorted({max(1, round(trace.unique_blocks * part)) for part in SHARES})
    for number, count in enumerate(blocks):
        pool = replace(fleet.pool, nbytes=count * block_bytes)
        before = number * trace.requests

        def tell(done: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done)

        found = replay(trace, replace(fleet, pool=pool), tell)
        peak = max(found.windows, key=rate)
        tried.append(
            Size(
                nbytes=pool.nbytes,
                hit_ratio=found.total.hit_ratio,
                servers=math.ceil(pool.nbytes / server_bytes),
                read_rate=peak.read_bytes / window,
                write_rate=peak.written_bytes / window,
            )
        )
    target = share * tried[-1].hit_ratio
    enough = next(each for each in tried if each.hit_ratio >= target)
    return Sizes(tried, enough, share)
