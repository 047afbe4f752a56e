"""`penstock bench lookup` and `penstock bench gil` measure what they say, and leave nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock._native import Store
from penstock.cli.main import main


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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_loop_beside_the_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    url = f"file://{tmp_path}/pool?size=1GiB"
    found = document(capsys, "gil", url, "--passes", "5", "--seconds", "0.5")
    figures = {name: value for name, value in found.items() if isinstance(value, float)}
    assert min(figures.values()) > 0
    # Of one run, pass by pass in turn: other programs slow both sides down.
    assert figures["kept_to_other_process"] >= 0.8
    assert os.sched_getaffinity(0) == cores
    assert Store.open(url).usage(timeout=5) == []
