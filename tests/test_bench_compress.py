"""`benches.compress` codes what it says, and says it in JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benches import compress
from penstock._native import Coder
from penstock.errors import ConfigError, Rejected

Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the bench with values of 64 KiB, and reads its result."""
    file = tmp_path / "found.json"
    small = ["--size", "64KiB", "--passes", "1", "--uncommitted", "--json", str(file)]

    def run(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["benches.compress", *small, *words])
        compress.main()
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    return run


@pytest.mark.parametrize("options", [[], ["--baseline"]])
def test_every_element_type_is_measured(bench: Bench, options: list[str]) -> None:
    result = bench(*options)
    assert result["kv"] == "synthetic"
    ratios = {row["element"]: row["ratio"] for row in result["rows"]}
    assert list(ratios) == Coder.elements
    assert 1.30 < ratios["bf16"] < 4 / 3
    assert all(1.04 < ratio < 8 / 7 for name, ratio in ratios.items() if name != "bf16")
    for row in result["rows"]:
        assert (row["instructions"] == "baseline") >= bool(options)
        assert min(row["encode_gb_s"], row["decode_gb_s"], row["memcpy_gb_s"]) > 0


def test_a_file_is_measured_as_what_it_holds(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "kv"
    # Two whole values that shrink, one that does not, and a short one.
    file.write_bytes(compress.synthetic("fp16", 128 << 10) + os.urandom(64 << 10) + bytes(1000))
    result = bench("--kv", str(file), "--element", "fp16")
    assert "count as they are" in capsys.readouterr().out
    assert result["kv"] == "kv"
    (row,) = result["rows"]
    assert (row["coded_values"], row["values"]) == (3, 4)
    assert row["payload_bytes"] == (192 << 10) + 1000
    assert 1 < row["ratio"] < 1.09


def test_a_coder_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ConfigError, match="there are bf16"):
        Coder("int3")
    coder = Coder("bf16")
    shared = bytearray(64)
    with pytest.raises(ConfigError, match="overlap"):
        coder.encode(shared, shared)
    with pytest.raises(Rejected, match="damaged"):
        coder.decode(b"no code", bytearray(4096))
