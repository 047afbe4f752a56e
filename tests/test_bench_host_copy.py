"""`benches.host_copy` copies what it says, and says it in JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benches import host_copy
from penstock.layout.negotiate import LAYOUTS

SMALL = "--layers 3 --heads 2 --head-dim 4 --block-size 2 --total 64KiB --passes 2"


def test_every_layout_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    words = [*SMALL.split(), "--uncommitted", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["benches.host_copy", *words])
    host_copy.main()
    shown = capsys.readouterr().out
    assert all(layout in shown for layout in LAYOUTS)
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["shape"]["block_bytes"] == 3 * 2 * 2 * (2 * 4 * 2)
    assert result["memcpy_gb_s"] > 0
    rows = {(row["layout"], row["interior"]): row for row in result["rows"]}
    assert {layout for layout, _ in rows} == set(LAYOUTS)
    pieces = {key: row["pieces"] for key, row in rows.items()}
    # A block in one piece, a piece a layer, a piece a layer and head; a piece a token and head
    # where the order inside a page is turned round, but that a layer's last meets the next's first.
    assert pieces["BLHNC", "HNC"] == pieces["BLNHC", "NHC"] == 1
    assert pieces["LBHNC", "HNC"] == pieces["LBNHC", "NHC"] == 3
    assert pieces["LHBNC", "HNC"] == pieces["BHLNC", "HNC"] == 6
    assert (pieces["LBHNC", "NHC"], pieces["BLHNC", "NHC"]) == (12, 10)
    for row in rows.values():
        assert row["gather_gb_s"] > 0
        assert row["scatter_to_memcpy"] > 0
        assert row["cpu_us_per_block"] > 0


def test_blocks_that_do_not_come_back_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = host_copy.Shape(layers=2, heads=1, tokens=2, content_bytes=4, blocks=4)
    real = host_copy.describe

    class Forgetful:
        """Scatters nothing."""

        def __init__(self, layout: str, address: int) -> None:
            self._real = real(shape, layout, address)
            self.interior = self._real.interior

        def with_interior(self, interior: str) -> Forgetful:
            return self

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

        def scatter(self, *_: object) -> int:
            return 0

    monkeypatch.setattr(
        host_copy, "describe", lambda s, layout, address: Forgetful(layout, address)
    )
    with pytest.raises(host_copy.WrongBytes, match="did not come back"):
        host_copy.measure(shape, 1)
