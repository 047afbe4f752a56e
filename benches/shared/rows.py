"""The rows of a bench: they take turns, pass by pass, and each is compared with the baseline.

What slows the machine for a while slows all rows of a pass. So the figures are medians over passes,
and ratios are taken pass by pass.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from benches.shared.report import median_ratio

T = TypeVar("T")


def rotated(rows: Sequence[T], number: int) -> list[T]:
    """The rows in the order of a pass: each pass begins with another one."""
    start = number % len(rows)
    return [*rows[start:], *rows[:start]]


def turns(rows: Sequence[T], passes: int, warm_up: int = 1) -> Iterator[tuple[int, T]]:
    """Gives every row in every pass, with the pass's number. Those below 0 warm up: connections,
    memory and code are used once. What they take does not count."""
    for number in range(-warm_up, passes):
        for row in rotated(rows, number):
            yield number, row


def groups(rows: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The rows in groups of so many: not all fit on the machine together."""
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


def processor_time(what: str) -> str:
    """The name under which the processor time of something is noted."""
    return f"{what}: processor time"


class Times:
    """Seconds that rows took, by what they did, pass by pass. Those of warm-up are dropped.

    Other figures of a row can be kept in the same way.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, number: int, row: str, what: str, seconds: float) -> None:
        """Notes what a row took in the pass of that number."""
        if number >= 0:
            self._seconds[row, what].append(seconds)

    def run(self, number: int, row: str, what: str, work: Callable[[], object]) -> None:
        """Does the work, and notes its seconds, and the processor time of all threads of this
        process: see `processor_time`."""
        processor, began = time.process_time(), time.perf_counter()
        work()
        self.add(number, row, what, time.perf_counter() - began)
        self.add(number, row, processor_time(what), time.process_time() - processor)

    def each(self, row: str, what: str) -> list[float]:
        """All seconds, pass by pass."""
        return self._seconds[row, what]

    def median(self, row: str, what: str) -> float:
        """The median of the seconds.

        Raises:
            statistics.StatisticsError: there are none.
        """
        return statistics.median(self._seconds[row, what])

    def ratio(self, row: str, baseline: str, what: str) -> float:
        """The median of the ratios to the baseline's seconds, pass by pass."""
        return median_ratio(self._seconds[row, what], self._seconds[baseline, what])
