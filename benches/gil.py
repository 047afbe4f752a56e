"""Whether Python keeps its speed while the engine moves data.

A loop counts in Python on one core. Three kinds of passes take turns: alone, while the engine
stores and loads blocks of 1 MiB at full rate on the other cores, and while another process does
that. As in vLLM, the loop's own thread submits and polls. What cores and a memory bus in common
cost shows in both. What the loop loses to its own engine beyond that are those calls, and whatever
the engine does with the interpreter's lock held. Run it as ``python -m benches.gil URL``.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from benches.shared import report
from benches.shared.mover import Mover, OtherProcess, seconds_queued
from benches.shared.report import GIB
from benches.shared.rows import Times, turns

ALONE, BESIDE, OTHER = "alone", "beside the engine", "beside another process"
_STEPS = range(250)
"""Steps of the loop between two looks at the clock. All integers in it are small ones that CPython
keeps. A loop that makes new integers depends on how full the interpreter's memory is, and so on
objects that were made before; its speed differs by up to a tenth."""
_BETWEEN_STEPS = 1e-3
"""Seconds between two polls of the engine. vLLM's polls are further apart."""


@dataclass
class Found:
    """Medians over passes. Each ratio is computed within one pass."""

    steps_per_second_alone: float
    steps_per_second_beside: float
    steps_per_second_other_process: float
    """Speed while another process moves the same blocks. It shows the cost of sharing the machine,
    without a shared interpreter lock."""
    kept: float
    """Ratio of the speed with the engine in this process to the speed alone."""
    kept_other_process: float
    """Ratio of the speed with the other process to the speed alone."""
    kept_to_other_process: float
    """Ratio of the speed with the engine in this process to the speed with the other process. It
    shows how much speed the interpreter lock leaves."""
    waits_per_second_alone: float
    waits_per_second_beside: float
    """How often the loop gave up its core in order to wait, not counting its calls of the engine.
    Waiting for the interpreter lock counts. (A thread that wants the lock gets it within 5 ms, and
    then keeps it as long as it likes.) Slow memory or a shared core does not count."""
    moved_gib_per_second: float
    """GiB per second stored and loaded while the loop ran."""
    moved_other_process_gib_per_second: float


def run(args: argparse.Namespace) -> tuple[str, Found]:
    """The pool's URL as it may be shown, and the figures."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("one core is not enough: the loop and the engine need one each")
    # The engine's threads and the other process inherit the cores that this thread has now.
    os.sched_setaffinity(0, cores[1:])
    try:
        with Mover(args.url, args.timeout) as mover, OtherProcess(args.url, args.timeout) as other:
            os.sched_setaffinity(0, cores[:1])
            return mover.url, _measure(mover, other, args)
    finally:
        os.sched_setaffinity(0, cores)


def _measure(mover: Mover, other: OtherProcess, args: argparse.Namespace) -> Found:
    rows: dict[str, Mover | OtherProcess | None] = {ALONE: None, BESIDE: mover, OTHER: other}
    # What is noted is a rate, not seconds.
    rates = Times()
    # The first pass is not counted: it connects and maps memory.
    for number, row in turns(list(rows), args.passes):
        moves = rows[row]
        if moves is not None:
            moves.go()
        counted = _count(args.seconds, moves.step if isinstance(moves, Mover) else None)
        rates.add(number, row, "steps", counted.steps)
        rates.add(number, row, "waits", counted.waits)
        if moves is not None:
            rates.add(number, row, "moved", moves.rest() / GIB)
    return Found(
        steps_per_second_alone=rates.median(ALONE, "steps"),
        steps_per_second_beside=rates.median(BESIDE, "steps"),
        steps_per_second_other_process=rates.median(OTHER, "steps"),
        kept=rates.ratio(BESIDE, ALONE, "steps"),
        kept_other_process=rates.ratio(OTHER, ALONE, "steps"),
        kept_to_other_process=rates.ratio(BESIDE, OTHER, "steps"),
        waits_per_second_alone=rates.median(ALONE, "waits"),
        waits_per_second_beside=rates.median(BESIDE, "waits"),
        moved_gib_per_second=rates.median(BESIDE, "moved"),
        moved_other_process_gib_per_second=rates.median(OTHER, "moved"),
    )


class _Pass(NamedTuple):
    """Steps and waits of the loop, per second."""

    steps: float
    waits: float


def _count(seconds: float, step: Callable[[], float] | None) -> _Pass:
    """Runs a loop that only counts, and calls `step` every millisecond.

    `step` returns seconds that do not count. Time in which the loop waits for its core, because
    other programs use it, does not count either. Time in which it waits for the interpreter lock
    counts."""
    start, queued, waits = time.perf_counter(), seconds_queued(), _switches()
    end, due, low, steps, uncounted = start + seconds, start, 0, 0, 0.0
    while (now := time.perf_counter()) < end:
        if step is not None and now >= due:
            before = _switches()
            uncounted += step()
            waits += _switches() - before
            due = now + _BETWEEN_STEPS
        for number in _STEPS:
            low = (low + number) & 0x7F
        steps += len(_STEPS)
    waits = _switches() - waits
    uncounted += seconds_queued() - queued
    counted = time.perf_counter() - start - uncounted
    return _Pass(steps / counted, waits / counted)


def _switches() -> int:
    """How often this thread has given up its core voluntarily (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def table(url: str, found: Found, passes: int) -> str:
    """A row for each kind of pass."""

    def line(row: str, steps: float, kept: str, waits: str, moved: str) -> list[str]:
        return [row, f"{steps / 1e6:.1f} M", kept, waits, moved]

    lines = [
        line(ALONE, found.steps_per_second_alone, "", f"{found.waits_per_second_alone:.1f}", ""),
        line(
            BESIDE,
            found.steps_per_second_beside,
            f"{found.kept:.3f}",
            f"{found.waits_per_second_beside:.1f}",
            f"{found.moved_gib_per_second:.2f} GiB/s",
        ),
        line(
            OTHER,
            found.steps_per_second_other_process,
            f"{found.kept_other_process:.3f}",
            "",
            f"{found.moved_other_process_gib_per_second:.2f} GiB/s",
        ),
    ]
    head = ["loop", "steps/s", "kept", "waits/s", "moved meanwhile"]
    ratio = f"{BESIDE}, to {OTHER}: {found.kept_to_other_process:.3f}"
    return f"{url}, passes: {passes}\n\n{report.table(head, lines)}\n\n{ratio}"


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(prog="benches.gil", description=__doc__)
    parser.add_argument("url", help="the pool to move blocks to and from")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a pass, each way")
    parser.add_argument("--passes", type=int, default=21)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for a round of blocks")
    args = report.begin(parser)
    url, found = run(args)
    result = {"url": url, "passes": args.passes} | asdict(found)
    report.finish(args, table(url, found, args.passes), result)


if __name__ == "__main__":
    main()
