"""Tests of a run in another order: `PENSTOCK_TEST_ORDER=SEED`. A test that needs the one before it
fails then. Tests of a module stay together, as they share what takes long to start."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

VARIABLE = "PENSTOCK_TEST_ORDER"


class Test(Protocol):
    """A test in a file."""

    @property
    def path(self) -> Path: ...


T = TypeVar("T", bound=Test)


def shuffled(items: list[T], seed: str) -> list[T]:
    """Modules in a random order, and the tests in each of them."""
    draws = random.Random(seed)
    modules = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    draws.shuffle(modules)
    for tests in modules:
        draws.shuffle(tests)
    return [test for tests in modules for test in tests]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if seed := os.environ.get(VARIABLE):
        items[:] = shuffled(items, seed)


def pytest_report_header() -> str | None:
    seed = os.environ.get(VARIABLE)
    return seed and f"order: {VARIABLE}={seed}"
