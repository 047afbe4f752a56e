"""Loads from shared memory in place, against loads through slots of the engine.

Both ways run in one process, over one kind of pool, in turn. The way through slots is the
baseline. memcpy of the same bytes is the limit. Processor time is that of all threads. Run it as
``python -m benches.in_place``.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benches import report
from benches.report import MIB, median_ratio, progress, size_name
from penstock._native import Blocks, Buffer, Engine, Event, Outcome, Store
from penstock.cli.bench_copy import Shape, describe
from penstock.pool.namespace import namespace_digest

TIMEOUT = 30.0
BYTES = 64 * MIB
"""Of all blocks of a pass: more than a core's own caches hold."""
SHAPES = {
    size_name(size): Shape(layers=16, heads=8, tokens=16, content_bytes=c, blocks=BYTES // size)
    for c, size in ((32, 64 << 10), (512, MIB), (1024, 2 * MIB))
}
WAYS = ("in place", "slots")


class Took(NamedTuple):
    """Seconds that passed, and seconds of processor time of all threads."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> Took:
        """A beginning."""
        return cls(time.perf_counter(), time.process_time())

    def until_now(self) -> Took:
        """What has passed since this beginning."""
        return Took(time.perf_counter() - self.wall, time.process_time() - self.processor)


class Way:
    """An engine over a pool of its own."""

    def __init__(self, name: str, shape: Shape, layout: str) -> None:
        self._path = Path(f"/dev/shm/penstock-bench-in-place-{os.getpid()}-{name.split()[0]}")
        pool = self._path.name.removeprefix("penstock-")
        self._store = Store.open(f"shm://{pool}?size={4 * BYTES}")
        self._memory = mmap.mmap(-1, BYTES)
        self._memory.write(os.urandom(BYTES))
        self._engine = Engine(
            self._store,
            slot_bytes=shape.block_bytes,
            slots=2 * shape.blocks,
            keep=False,
            in_place=name == "in place",
        )
        self._engine.register(
            describe(shape, layout, Buffer(self._memory, writable=True).address), 0
        )
        self._engine.name_group(0, namespace_digest({"kind": "penstock bench in place"}))
        self._blocks = Blocks(
            [
                (0, block, hashlib.sha256(block.to_bytes(4, "little")).digest(), None)
                for block in range(shape.blocks)
            ]
        )
        self._jobs = 1
        self._engine.submit_store(self._jobs, self._blocks)
        self._end(Event.STORED, Outcome.STORED)

    def close(self) -> None:
        """Ends the engine and removes the pool."""
        self._engine.shutdown(TIMEOUT)
        self._path.unlink()

    def load(self) -> Took:
        """The time to load all blocks."""
        began = Took.now()
        self._jobs += 1
        self._engine.submit_load(self._jobs, self._blocks, TIMEOUT)
        self._end(Event.LOADED, Outcome.LOADED)
        return began.until_now()

    def _end(self, event: Event, outcome: Outcome) -> None:
        while True:
            if not self._engine.wait(TIMEOUT):
                raise TimeoutError(f"no end of job {self._jobs}")
            for done in self._engine.poll():
                if done.event == event:
                    if set(done.outcomes) != {outcome}:
                        raise OSError(f"not all blocks: {set(done.outcomes)}")
                    return


def memcpy(source: mmap.mmap, target: mmap.mmap) -> Took:
    """The time of one copy of as many bytes."""
    began = Took.now()
    memoryview(target)[:] = memoryview(source)
    return began.until_now()


def measure(shape: Shape, layout: str, passes: int) -> dict[str, Any]:
    """A row: both ways with blocks of this shape, in this layout."""
    source, target = mmap.mmap(-1, BYTES), mmap.mmap(-1, BYTES)
    source.write(os.urandom(BYTES))
    took: dict[str, list[Took]] = {name: [] for name in (*WAYS, "memcpy")}
    with ExitStack() as ending:
        ways = {name: Way(name, shape, layout) for name in WAYS}
        for way in ways.values():
            ending.callback(way.close)
        # The first pass brings pages into being.
        for number in range(passes + 1):
            passed = {name: way.load() for name, way in ways.items()}
            passed["memcpy"] = memcpy(source, target)
            for name in passed if number else ():
                took[name].append(passed[name])
    wall = {name: [each.wall for each in of] for name, of in took.items()}
    processor = {name: [each.processor for each in of] for name, of in took.items()}
    return {
        "layout": layout,
        "block": size_name(shape.block_bytes),
        "gb_s": {name: BYTES / statistics.median(of) / 1e9 for name, of in wall.items()},
        "in_place_to_slots": median_ratio(wall["in place"], wall["slots"]),
        "processor_in_place_to_slots": median_ratio(processor["in place"], processor["slots"]),
    }


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=21)
    parser.add_argument("--layouts", nargs="+", default=["BLHNC", "LBHNC"])
    args = report.begin(parser)
    rows: list[dict[str, Any]] = []
    for layout in args.layouts:
        for name, shape in SHAPES.items():
            progress(f"{layout}, blocks of {name}")
            rows.append(measure(shape, layout, args.passes))
    table = report.table(
        [
            "layout",
            "block",
            "in place",
            "slots",
            "memcpy",
            "time, in place : slots",
            "processor time, in place : slots",
        ],
        [
            [
                row["layout"],
                row["block"],
                *(f"{row['gb_s'][n]:.1f} GB/s" for n in ("in place", "slots", "memcpy")),
                f"{row['in_place_to_slots']:.2f}",
                f"{row['processor_in_place_to_slots']:.2f}",
            ]
            for row in rows
        ],
    )
    report.finish(args, table, {"passes": args.passes, "rows": rows})


if __name__ == "__main__":
    main()
