"""`penstock bench gil`: whether Python keeps its speed while the engine moves data."""

from __future__ import annotations

import argparse
import hashlib
import mmap
import multiprocessing
import os
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

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
_BETWEEN_STEPS = 1e-3
"""Seconds between two looks at what the engine has finished; vLLM's are further apart."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass
class Report:
    """Medians over passes; ratios are of one pass."""

    steps_per_second_alone: float
    steps_per_second_beside: float
    steps_per_second_other_process: float
    """While another process moves the same blocks: what sharing the machine costs, without a
    common interpreter's lock."""
    kept: float
    """Beside the engine, to alone."""
    kept_other_process: float
    """Beside the other process, to alone."""
    kept_to_other_process: float
    """Beside the engine, to beside the other process: what the lock leaves."""
    moved_gib_per_second: float
    """Bytes stored and loaded while the loop ran."""
    moved_other_process_gib_per_second: float


def add_target(targets: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the target to `penstock bench`."""
    gil = targets.add_parser(
        "gil",
        help="a Python loop's speed while the engine moves data",
        description="Counts in Python on one core, alone and, pass by pass in turn, while the "
        "engine stores and loads blocks of 1 MiB at full rate on the others, and while another "
        "process does that. As in vLLM, the loop's own thread submits and polls. What cores and a "
        "memory bus in common cost shows in both; what the loop loses to its own engine beyond "
        "that are those calls, and whatever the engine does with the interpreter's lock held.",
    )
    words.add_pool_url(gil)
    gil.add_argument(
        "--seconds",
        metavar="SECONDS",
        type=words.seconds_argument,
        default=0.5,
        help="length of a pass, each way (default: %(default)s)",
    )
    words.add_measurement(gil, passes=21, timed="a round of blocks")


def run(args: argparse.Namespace) -> int:
    """Measures and shows the figures.

    Raises:
        ConfigError: there is one core only, where both would take turns in any case.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("one core is not enough: the loop and the engine need one each")
    url, timeout = words.pool_url(args), args.timeout
    # The engine's threads, and the other process, stay where this thread is when it starts them.
    os.sched_setaffinity(0, cores[1:])
    try:
        with _Mover(url, timeout) as mover, _OtherProcess(url, timeout) as other:
            os.sched_setaffinity(0, cores[:1])
            report = _measure(mover, other, args)
    finally:
        os.sched_setaffinity(0, cores)
    if args.json:
        words.print_json({"url": mover.url, "passes": args.passes, **asdict(report)})
    else:
        _show(mover.url, report, args.passes)
    return 0


def _measure(mover: _Mover, other: _OtherProcess, args: argparse.Namespace) -> Report:
    alone: list[float] = []
    steps: dict[_Mover | _OtherProcess, list[float]] = {mover: [], other: []}
    rates: dict[_Mover | _OtherProcess, list[float]] = {mover: [], other: []}
    for number in range(args.passes + 1):
        without = _count(args.seconds, None)
        # The first pass connects, and maps memory.
        if number:
            alone.append(without)
        for one in (mover, other) if number % 2 else (other, mover):
            one.go()
            beside = _count(args.seconds, one.step if isinstance(one, _Mover) else None)
            rate = one.rest()
            if number:
                steps[one].append(beside)
                rates[one].append(rate / (1 << 30))
    return Report(
        steps_per_second_alone=statistics.median(alone),
        steps_per_second_beside=statistics.median(steps[mover]),
        steps_per_second_other_process=statistics.median(steps[other]),
        kept=_ratio(steps[mover], alone),
        kept_other_process=_ratio(steps[other], alone),
        kept_to_other_process=_ratio(steps[mover], steps[other]),
        moved_gib_per_second=statistics.median(rates[mover]),
        moved_other_process_gib_per_second=statistics.median(rates[other]),
    )


def _ratio(these: list[float], those: list[float]) -> float:
    """Median of the passes' ratios."""
    return statistics.median(one / two for one, two in zip(these, those, strict=True))


def _count(seconds: float, step: Callable[[], float] | None) -> float:
    """Steps a second of a loop that does nothing but count, and to call `step` every millisecond,
    which returns seconds not to be counted. Nor is the time counted that the loop waits for its
    core, which other programs use; that for the interpreter's lock is."""
    start, queued = time.perf_counter(), _seconds_queued()
    end, due, steps, uncounted = start + seconds, start, 0, 0.0
    while (now := time.perf_counter()) < end:
        if step is not None and now >= due:
            uncounted += step()
            due = now + _BETWEEN_STEPS
        for _ in range(_STEPS):
            steps += 1
    uncounted += _seconds_queued() - queued
    return steps / (time.perf_counter() - start - uncounted)


def _seconds_queued() -> float:
    """How long this thread was ready to run and did not (proc(5), `schedstat`)."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except OSError:
        # A kernel that does not keep it.
        return 0.0


class _Mover:
    """Stores blocks and loads them again: one half of them is stored while the other is loaded."""

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
        # Of this run only.
        salt = os.urandom(8)
        keys = [
            _NAMESPACE + hashlib.sha256(salt + bytes([block]) + _SPAN).digest() + _SPAN
            for block in range(_SHAPE.blocks)
        ]
        objects = [(0, key, [block]) for block, key in enumerate(keys)]
        self._halves = [(objects[half::2], keys[half::2]) for half in range(2)]
        self._jobs = 0
        self._under_way: dict[int, tuple[str, int]] = {}
        """By job: the event that ends it, and the half that it moves."""
        self._going = False
        self._moved = 0
        self._began = 0.0

    def __enter__(self) -> _Mover:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown(self._timeout)

    def go(self) -> None:
        """Begins to move."""
        self._going, self._moved, self._began = True, 0, time.perf_counter()
        for half in range(2):
            self._submit("stored", half)

    def step(self) -> float:
        """Sees to what has ended: the next job of its half begins. Does not wait for a block.
        Returns the seconds of clearing up, which only a bench does, less those queued.

        Raises:
            StoreError: a block was not stored, or not loaded.
        """
        clearing = 0.0
        for job, event, outcomes, _ in self._engine.poll():
            wanted, half = self._under_way[job]
            if event != wanted:
                continue
            del self._under_way[job]
            failed = {name for name, _ in outcomes} - {wanted}
            if failed:
                raise StoreError(f"blocks were not {wanted}: {', '.join(sorted(failed))}")
            self._moved += sum(nbytes for _, nbytes in outcomes)
            if wanted == "stored":
                self._submit("loaded", half)
            else:
                start, queued = time.perf_counter(), _seconds_queued()
                self._store.remove(self._halves[half][1], timeout=self._timeout)
                clearing += time.perf_counter() - start - (_seconds_queued() - queued)
                if self._going:
                    self._submit("stored", half)
        return clearing

    def wait(self) -> None:
        """Waits for something to see to.

        Raises:
            StoreError: nothing has ended for too long.
        """
        if not self._engine.wait(self._timeout):
            raise StoreError(f"no block was moved in {self._timeout} seconds")

    def rest(self) -> float:
        """Returns when nothing moves any more: bytes stored and loaded in a second since `go`.

        Raises:
            StoreError: as for `step` and `wait`.
        """
        self._going = False
        while self._under_way:
            self.wait()
            self.step()
        return self._moved / (time.perf_counter() - self._began)

    def _submit(self, wanted: str, half: int) -> None:
        self._jobs += 1
        self._under_way[self._jobs] = (wanted, half)
        objects, _ = self._halves[half]
        if wanted == "stored":
            self._engine.submit_store(self._jobs, objects)
        else:
            self._engine.submit_load(self._jobs, objects, self._timeout)


class _OtherProcess:
    """A mover in a process of its own."""

    def __init__(self, url: str, timeout: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, url, timeout), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def __enter__(self) -> _OtherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        self._process.join()

    def go(self) -> None:
        """As for a mover."""
        self._orders.send("go")
        self._answer()

    def rest(self) -> float:
        """As for a mover."""
        self._orders.send("rest")
        return self._answer()

    def _answer(self) -> float:
        try:
            answer: float | Exception = self._orders.recv()
        except EOFError:
            raise StoreError("the other process died") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(orders: Connection, url: str, timeout: float) -> None:
    try:
        with _Mover(url, timeout) as mover:
            orders.send(0.0)
            while True:
                orders.recv()
                mover.go()
                orders.send(0.0)
                while not orders.poll():
                    mover.wait()
                    mover.step()
                orders.recv()
                orders.send(mover.rest())
    except EOFError:
        pass
    except Exception as error:
        orders.send(error)


def _show(url: str, report: Report, passes: int) -> None:
    table = Table(title=f"{url}, passes: {passes}", box=None)
    for heading in ("loop", "steps/s", "kept", "moved meanwhile"):
        table.add_column(heading, justify="right")
    table.add_row("alone", f"{report.steps_per_second_alone / 1e6:.1f} M", "", "")
    for name, steps, kept, moved in (
        (
            "beside the engine",
            report.steps_per_second_beside,
            report.kept,
            report.moved_gib_per_second,
        ),
        (
            "beside another process",
            report.steps_per_second_other_process,
            report.kept_other_process,
            report.moved_other_process_gib_per_second,
        ),
    ):
        table.add_row(name, f"{steps / 1e6:.1f} M", f"{kept:.3f}", f"{moved:.2f} GiB/s")
    words.console().print(table)
    words.console().print(
        f"beside the engine, to beside another process: {report.kept_to_other_process:.3f}"
    )
