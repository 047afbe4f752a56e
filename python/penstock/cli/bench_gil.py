"""`penstock bench gil`: whether Python keeps its speed while the engine moves data."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from rich.table import Table

from penstock.cli import words
from penstock.cli.mover import Mover, OtherProcess, seconds_queued
from penstock.errors import ConfigError

_STEPS = range(250)
"""Steps of the loop between two looks at the clock. All integers in it are small ones that CPython
keeps. A loop that makes new integers depends on how full the interpreter's memory is, and so on
objects that were made before; its speed differs by up to a tenth."""
_BETWEEN_STEPS = 1e-3
"""Seconds between two polls of the engine. vLLM's polls are further apart."""


@dataclass
class Report:
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
        ConfigError: there is only one core. There the loop and the engine take turns in any case.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("one core is not enough: the loop and the engine need one each")
    url, timeout = words.pool_url(args), args.timeout
    # The engine's threads and the other process inherit the cores that this thread has now.
    os.sched_setaffinity(0, cores[1:])
    try:
        with Mover(url, timeout) as mover, OtherProcess(url, timeout) as other:
            os.sched_setaffinity(0, cores[:1])
            report = _measure(mover, other, args)
    finally:
        os.sched_setaffinity(0, cores)
    if args.json:
        found = {"url": mover.url, "passes": args.passes, **asdict(report)}
        words.print_measurement(args, found)
    else:
        _show(mover.url, report, args.passes)
    return 0


def _measure(mover: Mover, other: OtherProcess, args: argparse.Namespace) -> Report:
    alone: list[_Pass] = []
    beside: dict[Mover | OtherProcess, list[_Pass]] = {mover: [], other: []}
    rates: dict[Mover | OtherProcess, list[float]] = {mover: [], other: []}
    for number in range(args.passes + 1):
        without = _count(args.seconds, None)
        # The first pass is not counted: it connects and maps memory.
        if number:
            alone.append(without)
        for one in (mover, other) if number % 2 else (other, mover):
            one.go()
            counted = _count(args.seconds, one.step if isinstance(one, Mover) else None)
            rate = one.rest()
            if number:
                beside[one].append(counted)
                rates[one].append(rate / (1 << 30))
    return Report(
        steps_per_second_alone=_steps(alone),
        steps_per_second_beside=_steps(beside[mover]),
        steps_per_second_other_process=_steps(beside[other]),
        kept=_kept(beside[mover], alone),
        kept_other_process=_kept(beside[other], alone),
        kept_to_other_process=_kept(beside[mover], beside[other]),
        waits_per_second_alone=_waits(alone),
        waits_per_second_beside=_waits(beside[mover]),
        moved_gib_per_second=statistics.median(rates[mover]),
        moved_other_process_gib_per_second=statistics.median(rates[other]),
    )


class _Pass(NamedTuple):
    """Steps and waits of the loop, per second."""

    steps: float
    waits: float


def _steps(passes: list[_Pass]) -> float:
    return statistics.median(one.steps for one in passes)


def _waits(passes: list[_Pass]) -> float:
    return statistics.median(one.waits for one in passes)


def _kept(these: list[_Pass], those: list[_Pass]) -> float:
    """Median of the passes' ratios."""
    return statistics.median(one.steps / two.steps for one, two in zip(these, those, strict=True))


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


def _show(url: str, report: Report, passes: int) -> None:
    table = Table(title=f"{url}, passes: {passes}", box=None)
    for heading in ("loop", "steps/s", "kept", "waits/s", "moved meanwhile"):
        table.add_column(heading, justify="right")
    waits = f"{report.waits_per_second_alone:.1f}"
    table.add_row("alone", f"{report.steps_per_second_alone / 1e6:.1f} M", "", waits, "")
    for name, steps, kept, waits, moved in (
        (
            "beside the engine",
            report.steps_per_second_beside,
            report.kept,
            f"{report.waits_per_second_beside:.1f}",
            report.moved_gib_per_second,
        ),
        (
            "beside another process",
            report.steps_per_second_other_process,
            report.kept_other_process,
            "",
            report.moved_other_process_gib_per_second,
        ),
    ):
        table.add_row(name, f"{steps / 1e6:.1f} M", f"{kept:.3f}", waits, f"{moved:.2f} GiB/s")
    words.console().print(table)
    words.console().print(
        f"beside the engine, to beside another process: {report.kept_to_other_process:.3f}"
    )
