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
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benches import report
from benches.layouts import Shape, describe
from benches.report import MIB, median_ratio, progress, size_name
from penstock._native import Blocks, Buffer, Completion, Engine, Event, Outcome, Store
from penstock.pool.namespace import namespace_digest

TIMEOUT = 30.0
BYTES = 64 * MIB
"""Of all blocks of a pass: more than a core's own caches hold."""
SHAPES = {
    size_name(size): Shape(layers=16, heads=8, tokens=16, content_bytes=c, blocks=BYTES // size)
    for c, size in ((32, 64 << 10), (512, MIB), (1024, 2 * MIB))
}
WAYS = ("in place", "slots")
WARM_UP = 4
"""Passes after which node memory and pool have used all their memory."""
DONE = ("load", "release", "store")
PARTS = ("GB/s in place / slots", "time", "processor time")


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
        self._shape = shape
        self._names = [f"bench-in-place-{os.getpid()}-{name.split()[0]}-{n}" for n in range(2)]
        size = 4 * BYTES
        node, pool = (Store.open(f"shm://{each}?size={size}") for each in self._names)
        self._memory = mmap.mmap(-1, BYTES)
        self._memory.write(os.urandom(BYTES))
        self._engine = Engine(
            pool,
            node=node,
            slot_bytes=shape.block_bytes,
            # Stores get three quarters of them.
            slots=2 * shape.blocks,
            in_place=name == "in place",
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
        for name in self._names:
            Path(f"/dev/shm/penstock-{name}").unlink()

    def store(self) -> tuple[float, Took]:
        """Stores all blocks as new ones: the time until they are released, and until the end."""
        self._jobs += 1
        self._blocks = Blocks(
            [
                (0, block, hashlib.sha256(f"{self._jobs} {block}".encode()).digest(), None)
                for block in range(self._shape.blocks)
            ]
        )
        began = Took.now()
        self._engine.submit_store(self._jobs, self._blocks)
        self._end(Event.RELEASED, None)
        released = began.until_now().wall
        self._end(Event.STORED, Outcome.STORED)
        return released, began.until_now()

    def load(self) -> Took:
        """The time to load all blocks."""
        began = Took.now()
        self._jobs += 1
        self._engine.submit_load(self._jobs, self._blocks, TIMEOUT)
        self._end(Event.LOADED, Outcome.KEPT)
        return began.until_now()

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


def memcpy(source: mmap.mmap, target: mmap.mmap) -> Took:
    """The time of one copy of as many bytes."""
    began = Took.now()
    memoryview(target)[:] = memoryview(source)
    return began.until_now()


def measure(shape: Shape, layout: str, passes: int) -> dict[str, Any]:
    """A row: both ways with blocks of this shape, in this layout."""
    source, target = mmap.mmap(-1, BYTES), mmap.mmap(-1, BYTES)
    source.write(os.urandom(BYTES))
    copies: list[float] = []
    # Seconds, by the way and what was done.
    wall: dict[tuple[str, str], list[float]] = defaultdict(list)
    processor: dict[tuple[str, str], list[float]] = defaultdict(list)
    with ExitStack() as ending:
        ways = {name: Way(name, shape, layout) for name in WAYS}
        for way in ways.values():
            ending.callback(way.close)
        # The first passes bring pages into being.
        for number in range(-WARM_UP, passes):
            if number == 0:
                copies.clear()
                wall.clear()
                processor.clear()
            for name, way in ways.items():
                released, stored = way.store()
                loaded = way.load()
                wall[name, "release"].append(released)
                for what, took in (("store", stored), ("load", loaded)):
                    wall[name, what].append(took.wall)
                    processor[name, what].append(took.processor)
            copies.append(memcpy(source, target).wall)

    def speed(seconds: list[float]) -> float:
        return BYTES / statistics.median(seconds) / 1e9

    row: dict[str, Any] = {"layout": layout, "block": size_name(shape.block_bytes)}
    row["memcpy_gb_s"] = speed(copies)
    for what in DONE:
        row[what] = {
            "in_place_gb_s": speed(wall["in place", what]),
            "slots_gb_s": speed(wall["slots", what]),
            "time": median_ratio(wall["in place", what], wall["slots", what]),
        }
        if what != "release":
            row[what]["processor_time"] = median_ratio(
                processor["in place", what], processor["slots", what]
            )
    return row


def _cells(of: dict[str, float]) -> list[str]:
    speeds = f"{of['in_place_gb_s']:.1f} / {of['slots_gb_s']:.1f}"
    processor = f"{of['processor_time']:.2f}" if "processor_time" in of else ""
    return [speeds, f"{of['time']:.2f}", processor]


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
