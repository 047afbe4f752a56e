"""`penstock bench lookup` and `penstock bench gil` measure what they say, and leave nothing."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from penstock._native import Store
from penstock.cli.main import main

WAITS_FOR_THE_LOCK = 10
"""A second. A page that has to be fetched is a wait as well; none is seen as a rule."""


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
    assert Store.open(url).usage(timeout=5) == []


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
    assert Store.open(url).usage(timeout=5) == []


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_loop_that_waits_for_the_lock_is_noticed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/pool?size=1GiB"
    done = threading.Event()

    def take_the_lock() -> None:
        while not done.wait(0.0005):
            sum(range(20_000))

    thread = threading.Thread(target=take_the_lock)
    thread.start()
    try:
        # For once, other programs may leave that thread no time to take the lock.
        tries = [
            document(capsys, "gil", url, "--passes", "5", "--seconds", "0.3") for _ in range(3)
        ]
    finally:
        done.set()
        thread.join()
    for name in ("waits_per_second_alone", "waits_per_second_beside"):
        assert max(found[name] for found in tries) > 2 * WAITS_FOR_THE_LOCK
