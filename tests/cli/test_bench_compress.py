"""`penstock bench compress` codes what it says, and says it in JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock._native import Coder
from penstock.cli import bench_compress, main
from penstock.errors import ConfigError, Rejected

SMALL = ["bench", "compress", "--size", "64KiB", "--passes", "1"]


@pytest.mark.parametrize("options", [[], ["--baseline"]])
def test_every_element_type_is_measured(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main([*SMALL, *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kv"] == "synthetic"
    ratios = {row["element"]: row["ratio"] for row in result["rows"]}
    assert list(ratios) == Coder.elements
    assert 1.30 < ratios["bf16"] < 4 / 3
    assert all(1.04 < ratio < 8 / 7 for name, ratio in ratios.items() if name != "bf16")
    for row in result["rows"]:
        assert (row["instructions"] == "baseline") >= bool(options)
        assert min(row["encode_gb_s"], row["decode_gb_s"], row["memcpy_gb_s"]) > 0


def test_a_file_is_measured_as_what_it_holds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "kv"
    # Two whole values that shrink, one that does not, and a short one.
    file.write_bytes(
        bench_compress.synthetic("fp16", 128 << 10) + os.urandom(64 << 10) + bytes(1000)
    )
    assert main([*SMALL, "--kv", str(file), "--element", "fp16"]) == 0
    assert "count as they are" in capsys.readouterr().out
    assert main([*SMALL, "--kv", str(file), "--element", "fp16", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kv"] == "kv"
    (row,) = result["rows"]
    assert (row["coded_values"], row["values"]) == (3, 4)
    assert row["payload_bytes"] == (192 << 10) + 1000
    assert 1 < row["ratio"] < 1.09


def test_a_file_that_is_empty_or_missing_is_said(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for file, said in ((empty, "is empty"), (tmp_path / "absent", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            bench_compress._read(file)


def test_a_coder_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ConfigError, match="there are bf16"):
        Coder("int3")
    coder = Coder("bf16")
    shared = bytearray(64)
    with pytest.raises(ConfigError, match="overlap"):
        coder.encode(shared, shared)
    with pytest.raises(Rejected, match="damaged"):
        coder.decode(b"no code", bytearray(4096))
