"""`benches.gil` measures what it says, notices a lock that is held, and leaves nothing."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benches import gil
from lab.waiting import LIMIT
from penstock._native import Store

Bench = Callable[[int, float], dict[str, Any]]

WAITS_FOR_THE_LOCK = 10
"""A second. A page that has to be fetched is a wait as well; none is seen as a rule.
`docs/benchmarks/engine.md` says how many there are if another thread takes the lock."""


class Clock:
    """A pass lasts until its loop has waited so often, however long that takes.

    It counts the loop's waits itself, and leaves out, as the loop does, those of its calls of the
    engine.
    """

    def __init__(self, seconds: float, waits: int) -> None:
        self._seconds = seconds
        self._waits = waits
        self._since = 0
        self._limit = 0.0

    def begin(self) -> None:
        self._since = voluntary_switches()
        self._limit = time.monotonic() + LIMIT

    def leave_out(self, step: Callable[[], float]) -> None:
        before = voluntary_switches()
        step()
        self._since += voluntary_switches() - before

    def perf_counter(self) -> float:
        assert time.monotonic() < self._limit, "the loop did not wait"
        is_over = voluntary_switches() - self._since >= self._waits
        return self._seconds if is_over else 0.0


def voluntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the bench over a directory of its own, and reads its result."""
    file = tmp_path / "found.json"
    url = f"file://{tmp_path}/pool?size=1GiB"

    def run(passes: int, seconds: float) -> dict[str, Any]:
        words = ["--passes", str(passes), "--seconds", str(seconds), "--uncommitted"]
        monkeypatch.setattr(sys, "argv", ["benches.gil", url, *words, "--json", str(file)])
        gil.main()
        assert Store.open(url).usage(timeout=LIMIT) == []
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    return run


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_loop_beside_the_engine(bench: Bench) -> None:
    cores = os.sched_getaffinity(0)
    found = bench(5, 0.5)
    figures = {name: value for name, value in found.items() if isinstance(value, float)}
    waits = figures.pop("waits_per_second_beside")
    assert min(rate for name, rate in figures.items() if "waits" not in name) > 0
    # Whatever the machine's other programs do: the speed depends on them, on the cores' common
    # memory, and on whether the cores are two. The next test shows what waiting looks like.
    assert waits < WAITS_FOR_THE_LOCK
    assert os.sched_getaffinity(0) == cores


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_loop_that_waits_for_the_lock_is_noticed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, waits = 0.3, 20
    clock = Clock(seconds, waits)
    count = gil._count

    def count_by_the_clock(seconds: float, step: Callable[[], float] | None) -> Any:
        def timeless() -> float:
            assert step is not None
            clock.leave_out(step)
            return 0.0

        clock.begin()
        return count(seconds, None if step is None else timeless)

    monkeypatch.setattr(gil, "_count", count_by_the_clock)
    monkeypatch.setattr(gil, "time", clock)
    monkeypatch.setattr(gil, "seconds_queued", lambda: 0.0)
    done = threading.Event()

    def take_the_lock() -> None:
        while not done.wait(0.0005):
            sum(range(20_000))

    thread = threading.Thread(target=take_the_lock)
    thread.start()
    try:
        found = bench(2, seconds)
    finally:
        done.set()
        thread.join()
    for name in ("waits_per_second_alone", "waits_per_second_beside"):
        rate = found[name]
        assert isinstance(rate, float)
        # A few may come as the loop calls the engine, and are left out on one side only.
        assert rate > 0.5 * waits / seconds > 2 * WAITS_FOR_THE_LOCK
