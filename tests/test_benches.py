"""Benches are run by hand, and now and then: what they import is still there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benches"
ELSEWHERE = ("sglang",)
"""What has an environment of its own."""


@pytest.mark.parametrize("bench", sorted(file.stem for file in FOLDER.glob("*.py")))
def test_a_bench_is_imported(bench: str) -> None:
    try:
        importlib.import_module(f"benches.{bench}")
    except ModuleNotFoundError as error:
        if error.name not in ELSEWHERE:
            raise
        pytest.skip(f"{error.name} is not here")
