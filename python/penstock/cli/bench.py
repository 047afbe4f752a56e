"""`penstock bench`: how fast a pool is from here. `bench_lookup.py` has the other target."""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock import Pool, environment
from penstock._native import Store
from penstock.cli import bench_lookup, words
from penstock.errors import PenstockError
from penstock.pool.namespace import namespace_digest

if TYPE_CHECKING:
    from argparse import _SubParsersAction

DEFAULT_SIZES = "64KiB,256KiB,1MiB,4MiB"
SAMPLES = 64
"""Number of values that are fetched and stored one by one, to measure latencies."""

_MOST_THREADS = 1024
_IN_FLIGHT_BYTES = 16 << 20
_GIB = 1 << 30
_STAMP = struct.Struct("<QQ")
_SMALLEST = _STAMP.size
_NAMESPACE = namespace_digest({"kind": "penstock bench"})


@dataclass
class Row:
    """Figures for one size of value: medians over passes."""

    size: int
    values: int
    batch: int
    put_mib_s: float = 0.0
    get_mib_s: float = 0.0
    put_cpu_s_per_gib: float = 0.0
    get_cpu_s_per_gib: float = 0.0
    put_p50_ms: float = 0.0
    put_p99_ms: float = 0.0
    get_p50_ms: float = 0.0
    get_p99_ms: float = 0.0
    misses: int = 0
    """Values that were gone before they were fetched: the pool is smaller than the stored data."""


@dataclass
class _Pass:
    seconds: float
    cpu_seconds: float


@dataclass
class _Measured:
    puts: list[_Pass] = field(default_factory=list)
    gets: list[_Pass] = field(default_factory=list)
    put_latencies: list[float] = field(default_factory=list)
    get_latencies: list[float] = field(default_factory=list)
    misses: int = 0


class WrongContent(PenstockError):
    """A value passed verification, but is not the one that was stored under its key."""

    kind = "wrong_content"


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `penstock`'s parser."""
    parser = subparsers.add_parser("bench", help="measure a pool, or look-ups in it")
    targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)
    pool = targets.add_parser(
        "pool",
        help="put and get throughput, latencies, CPU",
        description="Stores values, fetches all of them, verified, and removes them again, pass "
        "after pass. Throughput is of pipelined batches, latency of one value alone, CPU that of "
        "this process. The pool needs room for --total.",
    )
    words.add_pool_url(pool)
    pool.add_argument(
        "--size",
        metavar="SIZE[,SIZE…]",
        type=_sizes,
        default=DEFAULT_SIZES,
        help="bytes of a value (default: %(default)s)",
    )
    pool.add_argument(
        "--total",
        metavar="SIZE",
        type=words.size_argument,
        default="256MiB",
        help="bytes moved each way in a pass (default: %(default)s)",
    )
    pool.add_argument(
        "--threads",
        metavar="N",
        type=_threads,
        default=1,
        help="threads that put and get at once (default: %(default)s)",
    )
    pool.add_argument(
        "--batch",
        metavar="N",
        type=words.count_argument,
        default=None,
        help="values in a batch (default: 16, less for values over 1 MiB)",
    )
    words.add_measurement(pool, passes=3, timed="one batch")
    bench_lookup.add_target(targets)


def _sizes(text: str) -> list[int]:
    sizes = [words.size_argument(part) for part in text.split(",")]
    if min(sizes) < _SMALLEST:
        raise argparse.ArgumentTypeError(f"values need at least {_SMALLEST} bytes to be told apart")
    return sizes


def _threads(text: str) -> int:
    threads = words.count_argument(text)
    if threads > _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"must be at most {_MOST_THREADS:,}, not {threads:,}")
    return threads


def run(args: argparse.Namespace) -> int:
    """Runs the measurement of the chosen target."""
    # Taken first, because it holds the machine's load before the measurement.
    args.environment = environment.describe() if args.json else None
    return bench_lookup.run(args) if args.target == "lookup" else _run_pool(args)


def _run_pool(args: argparse.Namespace) -> int:
    """Measures every size and shows the figures."""
    store = Store.open(
        words.pool_url(args), client_name="penstock-bench", connections=max(8, args.threads)
    )
    rows = []
    # Progress goes to standard error, if that is a terminal. Figures go to standard output.
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with (
        Pool(store, _NAMESPACE, timeout=args.timeout) as pool,
        # Redrawn only between batches, because a drawing thread would be measured too.
        Progress(
            *columns,
            console=screen,
            auto_refresh=False,
            transient=True,
            disable=not sys.stderr.isatty(),
        ) as progress,
    ):
        for size in args.size:
            task = progress.add_task(f"values of {words.size(size)}", total=args.passes * 2 + 1)
            rows.append(_measure(pool, size, args, _Watch(progress, task)))
    if args.json:
        document = {
            "url": store.url,
            "threads": args.threads,
            "passes": args.passes,
            "total": args.total,
            "rows": [asdict(row) for row in rows],
        }
        words.print_measurement(args, document)
    else:
        _show(store.url, rows, args)
    return 0


@dataclass
class _Watch:
    progress: Progress
    task: TaskID

    def step(self) -> None:
        self.progress.advance(self.task)
        self.progress.refresh()


def _measure(pool: Pool, size: int, args: argparse.Namespace, watch: _Watch) -> Row:
    batch = args.batch or max(1, min(16, _IN_FLIGHT_BYTES // size))
    per_thread = max(1, args.total // size // args.threads)
    values = per_thread * args.threads
    batch = min(batch, per_thread)
    run_id = int.from_bytes(os.urandom(8), "little")
    workers = [
        _Worker(pool, run_id, range(i * per_thread, (i + 1) * per_thread), size, batch)
        for i in range(args.threads)
    ]
    measured = _Measured()
    try:
        with ThreadPoolExecutor(args.threads) as threads:
            workers[0].sample(measured)
            watch.step()
            for _ in range(args.passes):
                for worker in workers:
                    worker.remove()
                measured.puts.append(_timed(threads, [worker.put for worker in workers]))
                watch.step()
                measured.gets.append(_timed(threads, [worker.get for worker in workers]))
                watch.step()
    finally:
        for worker in workers:
            worker.remove()
    measured.misses = sum(worker.misses for worker in workers)
    return _row(size, values, batch, measured)


def _timed(threads: ThreadPoolExecutor, work: list[Callable[[], None]]) -> _Pass:
    ready = threading.Barrier(len(work) + 1)

    def wait_and(do: Callable[[], None]) -> None:
        ready.wait()
        do()

    running = [threads.submit(wait_and, do) for do in work]
    ready.wait()
    cpu, start = time.process_time(), time.perf_counter()
    for one in running:
        one.result()
    return _Pass(time.perf_counter() - start, time.process_time() - cpu)


class _Worker:
    """One thread's values: the same random bytes, each stamped with its own number."""

    def __init__(self, pool: Pool, run_id: int, numbers: range, size: int, batch: int) -> None:
        self._pool = pool
        self._run_id = run_id
        self._numbers = numbers
        self._batch = batch
        self._buffers = [bytearray(os.urandom(size)) for _ in range(batch)]
        self.misses = 0

    def put(self) -> None:
        """Stores all values, batch by batch."""
        for numbers in self._batches():
            items = []
            for number, buffer in zip(numbers, self._buffers, strict=False):
                _STAMP.pack_into(buffer, 0, self._run_id, number)
                items.append((self._key(number), buffer))
            self._pool.put_many(items)

    def get(self) -> None:
        """Fetches all values, batch by batch, and checks that each is the one asked for."""
        for numbers in self._batches():
            keys = [self._key(number) for number in numbers]
            outcomes = self._pool.get_many(keys, into=self._buffers[: len(keys)])
            for number, buffer, outcome in zip(numbers, self._buffers, outcomes, strict=False):
                if outcome is None:
                    self.misses += 1
                else:
                    self._check(number, buffer, outcome)

    def sample(self, measured: _Measured) -> None:
        """Times values one by one."""
        buffer = self._buffers[0]
        numbers = list(self._numbers)[:SAMPLES]
        # Brings connections and memory into the state that they have during work.
        self._pool.put(self._key(numbers[0]), buffer)
        self._pool.remove([self._key(numbers[0])])
        for number in numbers:
            _STAMP.pack_into(buffer, 0, self._run_id, number)
            start = time.perf_counter()
            self._pool.put(self._key(number), buffer)
            measured.put_latencies.append(time.perf_counter() - start)
        for number in numbers:
            start = time.perf_counter()
            outcome = self._pool.get(self._key(number), into=buffer, default=None)
            measured.get_latencies.append(time.perf_counter() - start)
            if outcome is not None:
                self._check(number, buffer, outcome)

    def remove(self) -> None:
        """Removes all values."""
        for numbers in self._batches():
            self._pool.remove([self._key(number) for number in numbers])

    def _check(self, number: int, buffer: bytearray, nbytes: int) -> None:
        # The checksum of all bytes was verified on arrival. The stamp shows which value it is.
        if nbytes != len(buffer) or _STAMP.unpack_from(buffer) != (self._run_id, number):
            raise WrongContent(f"value {number} came back as another one")

    def _batches(self) -> Iterator[range]:
        for at in range(0, len(self._numbers), self._batch):
            yield self._numbers[at : at + self._batch]

    def _key(self, number: int) -> bytes:
        return _STAMP.pack(self._run_id, number)


def _row(size: int, values: int, batch: int, measured: _Measured) -> Row:
    nbytes = size * values

    def rate(passes: list[_Pass]) -> float:
        return statistics.median(nbytes / (1 << 20) / one.seconds for one in passes)

    def cpu(passes: list[_Pass]) -> float:
        return statistics.median(one.cpu_seconds / (nbytes / _GIB) for one in passes)

    def percentile(latencies: list[float], share: float) -> float:
        ordered = sorted(latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000

    return Row(
        size=size,
        values=values,
        batch=batch,
        put_mib_s=rate(measured.puts),
        get_mib_s=rate(measured.gets),
        put_cpu_s_per_gib=cpu(measured.puts),
        get_cpu_s_per_gib=cpu(measured.gets),
        put_p50_ms=percentile(measured.put_latencies, 0.5),
        put_p99_ms=percentile(measured.put_latencies, 0.99),
        get_p50_ms=percentile(measured.get_latencies, 0.5),
        get_p99_ms=percentile(measured.get_latencies, 0.99),
        misses=measured.misses,
    )


def _show(url: str, rows: list[Row], args: argparse.Namespace) -> None:
    title = f"{url}, threads: {args.threads}, median of passes: {args.passes}"
    table = Table(title=title, box=None)
    for heading in (
        "value",
        "put MiB/s",
        "get MiB/s",
        "put p50 / p99 ms",
        "get p50 / p99 ms",
        "CPU s/GiB put",
        "get",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    console = words.console()
    console.print(table)
    misses = sum(row.misses for row in rows)
    if misses:
        console.print(
            f"{misses:,} values were gone before they were fetched: the pool has no room for "
            f"{words.size(args.total)}, so get figures are too high. Lower --total."
        )


def _cells(row: Row) -> tuple[Any, ...]:
    return (
        words.size(row.size),
        f"{row.put_mib_s:.0f}",
        f"{row.get_mib_s:.0f}",
        f"{row.put_p50_ms:.2f} / {row.put_p99_ms:.2f}",
        f"{row.get_p50_ms:.2f} / {row.get_p99_ms:.2f}",
        f"{row.put_cpu_s_per_gib:.2f}",
        f"{row.get_cpu_s_per_gib:.2f}",
    )
