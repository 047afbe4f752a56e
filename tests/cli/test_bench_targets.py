"""`penstock bench lookup` and `penstock bench gil` measure what they say, and leave nothing."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock._native import Store
from penstock.cli import bench_gil
from penstock.cli.main import main
from tests.waiting import LIMIT

WAITS_FOR_THE_LOCK = 10
"""A second. A page that has to be fetched is a wait as well; none is seen as a rule.
`benches.lock_waits` shows how many there are if another thread takes the lock."""


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


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["bench", *words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_look_ups_of_many_chunks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=1GiB"
    found = document(capsys, "lookup", url, "--chunks", "10,200", "--passes", "3")
    rows = found["rows"]
    assert isinstance(rows, list)
    assert [row["chunks"] for row in rows] == [10, 200]
    for row in rows:
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["us_per_chunk"] == pytest.approx(row["p50_ms"] * 1e3 / row["chunks"])
    assert Store.open(url).usage(timeout=LIMIT) == []


def test_a_pool_too_small_for_the_look_up_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lookup", "memory://?size=16KiB", "--chunks", "500"]) == 1
    assert "the pool is too small" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_loop_beside_the_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    url = f"file://{tmp_path}/pool?size=1GiB"
    found = document(capsys, "gil", url, "--passes", "5", "--seconds", "0.5")
    figures = {name: value for name, value in found.items() if isinstance(value, float)}
    waits = figures.pop("waits_per_second_beside")
    assert min(rate for name, rate in figures.items() if "waits" not in name) > 0
    # Whatever the machine's other programs do: the speed depends on them, on the cores' common
    # memory, and on whether the cores are two. The next test shows what waiting looks like.
    assert waits < WAITS_FOR_THE_LOCK
    assert os.sched_getaffinity(0) == cores
    assert Store.open(url).usage(timeout=LIMIT) == []


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_loop_that_waits_for_the_lock_is_noticed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/pool?size=1GiB"
    seconds, waits = 0.3, 20
    clock = Clock(seconds, waits)
    count = bench_gil._count

    def count_by_the_clock(seconds: float, step: Callable[[], float] | None) -> Any:
        def timeless() -> float:
            assert step is not None
            clock.leave_out(step)
            return 0.0

        clock.begin()
        return count(seconds, None if step is None else timeless)

    monkeypatch.setattr(bench_gil, "_count", count_by_the_clock)
    monkeypatch.setattr(bench_gil, "time", clock)
    monkeypatch.setattr(bench_gil, "seconds_queued", lambda: 0.0)
    done = threading.Event()

    def take_the_lock() -> None:
        while not done.wait(0.0005):
            sum(range(20_000))

    thread = threading.Thread(target=take_the_lock)
    thread.start()
    try:
        found = document(capsys, "gil", url, "--passes", "2", "--seconds", str(seconds))
    finally:
        done.set()
        thread.join()
    for name in ("waits_per_second_alone", "waits_per_second_beside"):
        rate = found[name]
        assert isinstance(rate, float)
        # A few may come as the loop calls the engine, and are left out on one side only.
        assert rate > 0.5 * waits / seconds > 2 * WAITS_FOR_THE_LOCK
