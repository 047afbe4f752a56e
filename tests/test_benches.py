"""Benches are run by hand, and now and then: what they import is still there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benches"
ELSEWHERE = ("sglang",)
"""What has an environment of its own."""


def modules() -> list[str]:
    files = (path.relative_to(FOLDER.parent) for path in FOLDER.rglob("*.py"))
    return sorted(".".join(path.with_suffix("").parts) for path in files)


@pytest.mark.parametrize("bench", modules())
def test_a_bench_is_imported(bench: str) -> None:
    try:
        importlib.import_module(bench)
    except ModuleNotFoundError as error:
        if error.name not in ELSEWHERE:
            raise
        pytest.skip(f"{error.name} is not here")
