"""Tests in another order."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

from tests.order import shuffled


class Item(NamedTuple):
    path: Path
    name: str


ITEMS = [
    Item(Path(f"test_{module}.py"), f"{module}{number}") for module in "abcd" for number in range(5)
]


def names(seed: str) -> list[str]:
    return [item.name for item in shuffled(ITEMS, seed)]


def test_no_test_is_lost_and_a_seed_is_an_order() -> None:
    assert sorted(names("1")) == [item.name for item in ITEMS]
    assert names("1") == names("1")
    assert len({tuple(names(str(seed))) for seed in range(10)}) == 10


def test_tests_of_a_module_stay_together() -> None:
    modules = [module for module, _ in itertools.groupby(name[0] for name in names("3"))]
    assert sorted(modules) == ["a", "b", "c", "d"]
