"""The bench that measures the bounds of witnesses judges as the product does."""

from __future__ import annotations

import re
from pathlib import Path

from benches.witness import statistic, verdict

SOURCE = Path(__file__).parents[1] / "crates/penstock-value/src/compare.rs"

TYPES = {
    "Bf16": "bf16",
    "Fp16": "fp16",
    "Fp32": "fp32",
    "Fp8E4M3": "fp8_e4m3",
    "Fp8E5M2": "fp8_e5m2",
}


def test_what_is_the_same_for_all_types() -> None:
    found = dict(re.findall(r"const (\w+): (?:f32|usize) = ([\d.]+);", SOURCE.read_text()))
    expected = {
        "WINDOW": statistic.WINDOW,
        "FAR": statistic.FAR,
        "JUMP": verdict.JUMP,
        "PEAK": verdict.PEAKS,
        "FAR_SHARE": verdict.FAR,
        "FEW": verdict.FEW,
        "MOST_ULPS": verdict.MOST_ULPS,
    }
    assert {name: float(found[name]) for name in expected} == expected


def test_what_each_type_has_of_its_own() -> None:
    lines = re.findall(r"((?:Self::\w+(?: \| )?)+) => \[(.*)\]", SOURCE.read_text())
    found = {
        TYPES[name]: tuple(map(float, bounds.split(",")))
        for names, bounds in lines
        for name in re.findall(r"Self::(\w+)", names)
    }
    assert found == {
        name: (verdict.LAYER[name], verdict.FIRST_LAYER[name], verdict.JUMP_FLOOR[name])
        for name in TYPES.values()
    }
