"""Fixtures of the tests with SGLang: its configuration as a server publishes it, and a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.engines import one_rank, serving, write_model


@pytest.fixture(scope="session", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _served(model: Path) -> Iterator[None]:
    """A server serves the checkpoint."""
    with serving(model):
        yield
