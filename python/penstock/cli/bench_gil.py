"""`penstock bench gil`: whether Python keeps its speed while the engine moves data."""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import statistics
import struct
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from penstock._native import Buffer, Engine, Store
from penstock.cli import words
from penstock.cli.bench_copy import Shape, describe
from penstock.errors import ConfigError, StoreError
from penstock.pool.namespace import namespace_digest

_NAMESPACE = namespace_digest({"kind": "penstock bench gil"})
_SHAPE = Shape(layers=16, heads=8, tokens=16, content_bytes=512, blocks=64)
"""Blocks of 1 MiB."""
_SPAN = struct.pack("<4H", 0, _SHAPE.layers, 0, _SHAPE.heads)
_STEPS = 1000
"""Of the loop between two looks at the clock."""


@dataclass
class Report:
    """Medians over passes."""

    steps_per_second_alone: float
    steps_per_second_beside: float
    kept: float
    """Median of the passes' ratios of the two."""
    moved_gib_per_second: float
    """Bytes stored and loaded while the loop ran."""


def add_target(targets: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the target to `penstock bench`."""
    gil = targets.add_parser(
        "gil",
        help="a Python loop's speed while the engine moves data",
        description="Counts in Python on one core, alone and, pass by pass in turn, while the "
        "engine stores and loads blocks of 1 MiB at full rate on the others. Whatever the engine "
        "does with the interpreter's lock held is missing from the count.",
    )
    words.add_pool_url(gil)
    for name, default, text in (
        ("passes", 21, "passes, whose median counts"),
        ("timeout", 30, "seconds that a round of blocks may take"),
    ):
        gil.add_argument(
            f"--{name}",
            metavar="N",
            type=words.count_argument,
            default=default,
            help=f"{text} (default: %(default)s)",
        )
    gil.add_argument(
        "--seconds",
        metavar="SECONDS",
        type=words.seconds_argument,
        default=0.5,
        help="length of a pass, each way (default: %(default)s)",
    )
    gil.add_argument("--json", action="store_true", help="write one JSON document instead")


def run(args: argparse.Namespace) -> int:
    """Measures and shows the figures.

    Raises:
        ConfigError: there is one core only, where both would take turns in any case.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("one core is not enough: the loop and the engine need one each")
    # The engine's threads stay where this one is when it starts them.
    os.sched_setaffinity(0, cores[1:])
    try:
        mover = _Mover(words.pool_url(args), float(args.timeout))
        os.sched_setaffinity(0, cores[:1])
        try:
            report = _measure(mover, args)
        finally:
            mover.stop()
    finally:
        os.sched_setaffinity(0, cores)
    if args.json:
        words.print_json({"url": mover.url, "passes": args.passes, **asdict(report)})
    else:
        _show(mover.url, report, args.passes)
    return 0


def _measure(mover: _Mover, args: argparse.Namespace) -> Report:
    alone, beside, rates = [], [], []
    for number in range(args.passes + 1):
        without = _count(args.seconds)
        before, start = mover.moved, time.perf_counter()
        mover.go()
        with_it = _count(args.seconds)
        seconds = time.perf_counter() - start
        moved = mover.moved - before
        mover.rest()
        # The first pass connects, and maps memory.
        if number:
            alone.append(without)
            beside.append(with_it)
            rates.append(moved / seconds / (1 << 30))
    ratios = [theirs / own for own, theirs in zip(alone, beside, strict=True)]
    return Report(
        steps_per_second_alone=statistics.median(alone),
        steps_per_second_beside=statistics.median(beside),
        kept=statistics.median(ratios),
        moved_gib_per_second=statistics.median(rates),
    )


def _count(seconds: float) -> float:
    """Steps a second of a loop that does nothing but count."""
    start = time.perf_counter()
    end, steps = start + seconds, 0
    while time.perf_counter() < end:
        for _ in range(_STEPS):
            steps += 1
    return steps / (time.perf_counter() - start)


class _Mover:
    """Stores blocks and loads them again, for as long as it is told to."""

    def __init__(self, url: str, timeout: float) -> None:
        self._timeout = timeout
        self._store = Store.open(url, client_name="penstock-bench")
        self.url = self._store.url
        self._memory = mmap.mmap(-1, _SHAPE.blocks * _SHAPE.block_bytes)
        self._memory.write(os.urandom(len(self._memory)))
        self._engine = Engine(
            self._store,
            slot_bytes=_SHAPE.block_bytes,
            # Some are kept for loads; stores that find none are dropped.
            slots=2 * _SHAPE.blocks,
            # Every load goes to the pool.
            keep=False,
            get_lanes=1,
        )
        address = Buffer(self._memory, writable=True).address
        self._engine.register(describe(_SHAPE, "BLHNC", address))
        self._salt = os.urandom(8)
        self._round = 0
        self.moved = 0
        """Bytes stored and loaded so far."""
        self._failure: Exception | None = None
        self._going, self._resting = threading.Event(), threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def go(self) -> None:
        """Begins to move."""
        self._resting.clear()
        self._going.set()

    def rest(self) -> None:
        """Returns when nothing moves any more.

        Raises:
            StoreError: a block was not stored, or not loaded.
        """
        self._going.clear()
        self._resting.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Ends the thread and the engine."""
        self._stopped = True
        self._going.set()
        self._thread.join()
        self._engine.shutdown(self._timeout)

    def _work(self) -> None:
        while True:
            if not self._going.is_set():
                self._resting.set()
                self._going.wait()
            if self._stopped:
                return
            try:
                self._move_once()
            except Exception as error:
                self._failure = error
                self._going.clear()

    def _move_once(self) -> None:
        self._round += 1
        keys = [
            _NAMESPACE + hashlib.sha256(self._salt + bytes([block]) + _SPAN).digest() + _SPAN
            for block in range(_SHAPE.blocks)
        ]
        objects = [(0, key, [block]) for block, key in enumerate(keys)]
        self._engine.submit_store(2 * self._round, objects)
        self._finish("stored")
        self._engine.submit_load(2 * self._round + 1, objects, self._timeout)
        self._finish("loaded")
        self._store.remove(keys, timeout=self._timeout)

    def _finish(self, wanted: str) -> None:
        while True:
            if not self._engine.wait(self._timeout):
                raise StoreError(f"blocks were not {wanted} in {self._timeout} seconds")
            events: list[tuple[int, str, list[tuple[str, int]]]] = self._engine.poll()
            for _, event, outcomes in events:
                if event != wanted:
                    continue
                failed = {name for name, _ in outcomes} - {wanted}
                if failed:
                    raise StoreError(f"blocks were not {wanted}: {', '.join(sorted(failed))}")
                self.moved += sum(nbytes for _, nbytes in outcomes)
                return


def _show(url: str, report: Report, passes: int) -> None:
    table = Table(title=f"{url}, passes: {passes}", box=None)
    for heading in ("loop alone", "beside the engine", "kept", "moved meanwhile"):
        table.add_column(heading, justify="right")
    cells: tuple[Any, ...] = (
        f"{report.steps_per_second_alone / 1e6:.1f} M steps/s",
        f"{report.steps_per_second_beside / 1e6:.1f} M steps/s",
        f"{report.kept:.3f}",
        f"{report.moved_gib_per_second:.2f} GiB/s",
    )
    table.add_row(*cells)
    words.console().print(table)
