"""How many requests a pool gets if it is an object store, in which values lie in packs.

A replay does not know which blocks share a pack, so each count is a range. The least: every pack
is full, and what a request reads lies side by side. The most: every request's blocks have packs of
their own, and a read meets as many packs as it has blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from penstock.sim.fleet import Fleet, Sums


@dataclass(frozen=True)
class ObjectStore:
    """The settings of a pool in an object store that matter for requests. The defaults are the
    pool's own."""

    pack_bytes: int = 16 << 20
    """Bytes of values that are sent as one object."""
    range_bytes: int = 4 << 20
    """The most bytes that one request reads."""
    fresh: float = 1.0
    """Seconds for which a listing says which blocks are not there."""


@dataclass(frozen=True)
class Requests:
    """How many requests of one kind there are, at least and at most."""

    least: int
    most: int

    def per_million(self, tokens: int) -> tuple[float, float]:
        """Requests for a million prompt tokens, if these are for `tokens`.

        >>> Requests(3, 10).per_million(2_000_000)
        (1.5, 5.0)
        """
        scale = 1e6 / max(1, tokens)
        return self.least * scale, self.most * scale


def requests(
    total: Sums, fleet: Fleet, block_bytes: int, seconds: float, store: ObjectStore
) -> dict[str, Requests]:
    """Requests by kind: `put`, `get` of values, `get` of packs' heads as `head`, and `list`.

    `total` is what a replay of `seconds` counted; `block_bytes` are those of one block.
    """
    packs = Requests(
        ceil(total.written_bytes / store.pack_bytes),
        min(
            ceil(total.written_bytes / store.pack_bytes) + total.pool_writers,
            ceil(total.written_bytes / block_bytes),
        ),
    )
    # Longer blocks are several objects; they still lie side by side.
    ranges = ceil(total.read_bytes / store.range_bytes)
    gets = Requests(
        max(ranges, total.pool_readers),
        max(ranges + total.pool_readers, ceil(total.read_bytes / block_bytes)),
    )
    # Each node lists once a period at the most, and only if it looks something up: a request's
    # blocks, and once more before it writes.
    periods = ceil(seconds / store.fresh) if store.fresh > 0 else total.requests * 2
    lists = min(fleet.nodes * periods, total.requests + total.pool_writers)
    others = max(0, fleet.nodes - 1)
    return {
        "put": packs,
        "get": gets,
        "head": Requests(0, packs.most * others),
        "list": Requests(min(fleet.nodes, lists), lists),
    }
