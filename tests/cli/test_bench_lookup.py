"""`penstock bench lookup` measures what it says, and leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.waiting import LIMIT
from penstock._native import Store
from penstock.cli.main import main


def test_look_ups_of_many_chunks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=1GiB"
    assert main(["bench", "lookup", url, "--chunks", "10,200", "--passes", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["chunks"] for row in rows] == [10, 200]
    for row in rows:
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["us_per_chunk"] == pytest.approx(row["p50_ms"] * 1e3 / row["chunks"])
    assert Store.open(url).usage(timeout=LIMIT) == []


def test_a_pool_too_small_for_the_look_up_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lookup", "memory://?size=16KiB", "--chunks", "500"]) == 1
    assert "the pool is too small" in capsys.readouterr().err
