"""Puts into shared memory that is full, against puts into shared memory with room.

A put into a full pool evicts other values. Both kinds go into one pool, in turn. All of its memory
has been written before. The pool is emptied, and gets values while there is room. Then it is
filled, and gets as many more. memcpy of the bytes is the limit of both. Run it as
``python -m benches.shm_full``.
"""

from __future__ import annotations

import argparse
import itertools
import os
from functools import partial
from typing import Any

from benches.shared import report
from benches.shared.pool_clients import TIMEOUT, penstock_key
from benches.shared.report import MIB, progress, size_name
from benches.shared.rows import Times
from lab.segments import Segment
from penstock._native import Store

BATCH = 8
"""Values of one call, as an engine's put lanes do it with large values."""
SHARE = 0.75
"""Share of the pool that is put while there is room, and again when it is full."""
ROWS = ("memcpy", "room", "full")


class Pool:
    """A pool in shared memory. All of its values have one size."""

    def __init__(self, url: str, pool_bytes: int, size: int) -> None:
        self._store = Store.open(url)
        self._value = memoryview(os.urandom(size))
        self._numbers = itertools.count()
        self._held: list[bytes] = []
        self.count = -(-int(pool_bytes * SHARE) // size // BATCH) * BATCH

    def put(self) -> None:
        """Puts `count` values that were never put before."""
        for _ in range(self.count // BATCH):
            keys = [penstock_key(f"value-{next(self._numbers)}") for _ in range(BATCH)]
            self._held += keys
            for outcome in self._store.put_many([(k, self._value) for k in keys], timeout=TIMEOUT):
                if outcome is not True:
                    raise OSError(f"not stored: {outcome}")

    def clear(self) -> None:
        """Removes all values."""
        self._store.remove(self._held, timeout=TIMEOUT)
        self._held.clear()

    def evictions(self) -> int:
        """Number of values that were evicted so far."""
        return self._store.stats()["evictions"]


def measure(pool: Pool, size: int, passes: int) -> dict[str, Any]:
    """Measures both kinds in every pass, in this order. The first pass is warm-up."""
    total = pool.count * size
    source, target = memoryview(os.urandom(total)), memoryview(bytearray(total))
    times = Times()
    for number in range(-1, passes):
        pool.clear()
        before = pool.evictions()
        times.run(number, "room", "put", pool.put)
        # With small values, a single bucket of the index may be full all the same.
        if pool.evictions() - before > pool.count * 0.001:
            raise OSError("values were given up while there was room")
        pool.put()
        before = pool.evictions()
        times.run(number, "full", "put", pool.put)
        if pool.evictions() - before < pool.count * 0.9:
            raise OSError("the pool was not full")
        times.run(number, "memcpy", "put", partial(target.__setitem__, slice(None), source))
    return {
        "size": size,
        "mib_per_second": {row: total / MIB / times.median(row, "put") for row in ROWS},
        "full_to_room": times.ratio("full", "room", "put"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """One row for each size."""
    lines = [
        [
            size_name(row["size"]),
            *(f"{row['mib_per_second'][way]:,.0f}" for way in ROWS),
            f"{row['full_to_room']:.2f}",
        ]
        for row in rows
    ]
    head = ["values", "memcpy, MiB/s", "put, with room", "put, full", "time, full to room"]
    return report.table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.shm_full", description=__doc__)
    parser.add_argument("--sizes", type=report.parse_sizes, default="64KiB,256KiB,1MiB,2MiB")
    parser.add_argument("--pool-mib", type=int, default=1024)
    parser.add_argument("--passes", type=int, default=9)
    args = report.begin(parser)
    rows = []
    for size in args.sizes:
        progress(f"{size_name(size)}: {args.passes} passes")
        pool_bytes = args.pool_mib * MIB
        with Segment("bench-full") as segment:
            url = segment.url(pool_bytes)
            rows.append(measure(Pool(url, pool_bytes, size), size, args.passes))
    report.finish(args, table(rows), {"pool_mib": args.pool_mib, "rows": rows})


if __name__ == "__main__":
    main()
