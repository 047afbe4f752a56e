"""The size of a pool: its bytes, its servers and its network traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock._native import Trace
from penstock.sim.fleet import Fleet, Sums, replay

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Pool sizes to try, as shares of all different blocks of the trace."""


@dataclass(frozen=True)
class Size:
    """A pool of one size, with its results under the trace."""

    nbytes: int
    hit_ratio: float
    servers: int
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
