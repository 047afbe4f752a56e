"""Loads from node memory in place and stores into it, against both through slots of the engine.

Both ways run in one process, each over node memory of its own, in turn. The way through slots is
the baseline. memcpy of the same bytes is the limit. The pool behind node memory is shared memory
too.
A store holds its blocks until it is released, and ends when the pool has them. Processor time is
that of all threads. Run it as ``python -m benches.in_place``.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from benches.shared import report
from benches.shared.layouts import Shape, describe
from benches.shared.report import MIB, progress, size_name
from benches.shared.rows import Times, processor_time, turns
from lab.segments import Segment
from penstock._native import Blocks, Buffer, Completion, Engine, Event, Outcome, Store
from penstock.pool.namespace import namespace_digest

TIMEOUT = 30.0
BYTES = 64 * MIB
"""Of all blocks of a pass: more than a core's own caches hold."""
SHAPES = {
    size_name(size): Shape(layers=16, heads=8, tokens=16, content_bytes=c, blocks=BYTES // size)
    for c, size in ((32, 64 << 10), (512, MIB), (1024, 2 * MIB))
}
WAYS = IN_PLACE, SLOTS = "in place", "slots"
WARM_UP = 4
"""Passes after which node memory and pool have used all their memory."""
DONE = ("load", "release", "store")
PARTS = ("GB/s in place / slots", "time", "processor time")


class Way:
    """An engine over a pool of its own."""

    def __init__(self, name: str, shape: Shape, layout: str) -> None:
        self._shape = shape
        self._ending = ExitStack()
        memory = [self._ending.enter_context(Segment("bench-place")) for _ in range(2)]
        node, pool = (Store.open(each.url(4 * BYTES)) for each in memory)
        self._memory = mmap.mmap(-1, BYTES)
        self._memory.write(os.urandom(BYTES))
        self._engine = Engine(
            pool,
            node=node,
            slot_bytes=shape.block_bytes,
            # Stores get three quarters of them.
            slots=2 * shape.blocks,
            in_place=name == IN_PLACE,
        )
        self._engine.register(
            describe(shape, layout, Buffer(self._memory, writable=True).address), 0
        )
        self._engine.name_group(0, namespace_digest({"kind": "penstock bench in place"}))
        self._jobs = 0
        self._heard: list[Completion] = []

    def close(self) -> None:
        """Ends the engine and removes the pools."""
        self._engine.shutdown(TIMEOUT)
        self._ending.close()

    def renew(self) -> None:
        """Gives all blocks new names."""
        self._jobs += 1
        self._blocks = Blocks(
            [
                (0, block, hashlib.sha256(f"{self._jobs} {block}".encode()).digest(), None)
                for block in range(self._shape.blocks)
            ]
        )

    def store(self, released: Callable[[], None]) -> None:
        """Stores all blocks. Tells when they are released, and ends when the pool has them."""
        self._engine.submit_store(self._jobs, self._blocks)
        self._end(Event.RELEASED, None)
        released()
        self._end(Event.STORED, Outcome.STORED)

    def load(self) -> None:
        """Loads all blocks."""
        self._jobs += 1
        self._engine.submit_load(self._jobs, self._blocks, TIMEOUT)
        self._end(Event.LOADED, Outcome.KEPT)

    def _end(self, event: Event, outcome: Outcome | None) -> None:
        while True:
            for done in self._heard:
                if done.event == event:
                    if outcome is not None and set(done.outcomes) != {outcome}:
                        raise OSError(f"not all blocks: {set(done.outcomes)}")
                    self._heard.remove(done)
                    return
            if not self._engine.wait(TIMEOUT):
                raise TimeoutError(f"no end of job {self._jobs}")
            self._heard += self._engine.poll()


def measure(shape: Shape, layout: str, passes: int) -> dict[str, Any]:
    """A row: both ways with blocks of this shape, in this layout."""
    source, target = (memoryview(mmap.mmap(-1, BYTES)) for _ in range(2))
    source[:] = os.urandom(BYTES)
    times = Times()
    with ExitStack() as ending:
        ways = {name: Way(name, shape, layout) for name in WAYS}
        for way in ways.values():
            ending.callback(way.close)
        for number, name in turns([*WAYS, "memcpy"], passes, WARM_UP):
            if name == "memcpy":
                times.run(number, name, "copy", partial(target.__setitem__, slice(None), source))
                continue
            way = ways[name]
            way.renew()
            began = time.perf_counter()

            def released(number: int = number, name: str = name, began: float = began) -> None:
                times.add(number, name, "release", time.perf_counter() - began)

            times.run(number, name, "store", partial(way.store, released))
            times.run(number, name, "load", way.load)

    def speed(row: str, what: str) -> float:
        return BYTES / times.median(row, what) / 1e9

    row: dict[str, Any] = {"layout": layout, "block": size_name(shape.block_bytes)}
    row["memcpy_gb_s"] = speed("memcpy", "copy")
    for what in DONE:
        row[what] = {
            "in_place_gb_s": speed(IN_PLACE, what),
            "slots_gb_s": speed(SLOTS, what),
            "time": times.ratio(IN_PLACE, SLOTS, what),
        }
        if what != "release":
            ratio = times.ratio(IN_PLACE, SLOTS, processor_time(what))
            row[what]["processor_time"] = ratio
    return row


def _cells(of: dict[str, float]) -> list[str]:
    speeds = f"{of['in_place_gb_s']:.1f} / {of['slots_gb_s']:.1f}"
    processor = f"{of['processor_time']:.2f}" if "processor_time" in of else ""
    return [speeds, f"{of['time']:.2f}", processor]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(prog="benches.in_place", description=__doc__)
    parser.add_argument("--passes", type=int, default=21)
    parser.add_argument("--layouts", nargs="+", default=["BLHNC", "LBHNC"])
    args = report.begin(parser)
    rows: list[dict[str, Any]] = []
    for layout in args.layouts:
        for name, shape in SHAPES.items():
            progress(f"{layout}, blocks of {name}")
            rows.append(measure(shape, layout, args.passes))
    table = report.table(
        ["layout", "block", "memcpy", *(f"{what}: {part}" for what in DONE for part in PARTS)],
        [
            [
                row["layout"],
                row["block"],
                f"{row['memcpy_gb_s']:.1f} GB/s",
                *(cell for what in DONE for cell in _cells(row[what])),
            ]
            for row in rows
        ],
    )
    report.finish(args, table, {"passes": args.passes, "rows": rows})


if __name__ == "__main__":
    main()
