"""The example of a store, as its author would have it: built, installed, proved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packages.conftest import ROOT, Environment, uv

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

EXAMPLE = ROOT / "examples/store-python"


@pytest.fixture(scope="module")
def installed(
    wheel: Path,
    make_environment: Callable[..., Environment],
    tmp_path_factory: pytest.TempPathFactory,
) -> Environment:
    """Penstock's wheel and that of the example, and nothing else."""
    folder = tmp_path_factory.mktemp("stores")
    uv("build", "--quiet", "--wheel", "--out-dir", str(folder), str(EXAMPLE))
    return make_environment(str(wheel), *map(str, folder.glob("*.whl")))


def test_it_is_found(installed: Environment) -> None:
    listed = json.loads(installed.said("penstock", "pool", "schemes", "--json"))
    brought = {store["scheme"]: store["distribution"] for store in listed}
    assert brought["sqlite"] == "penstock-store-sqlite 0.1.0"
    assert set(brought) == {"sqlite", "mooncake"}
    assert [store["problem"] for store in listed] == [""] * 2


def test_it_does_what_every_store_must_do(installed: Environment, tmp_path: Path) -> None:
    pool = f"sqlite://{tmp_path}/pool?size=256MiB"
    proved = json.loads(installed.said("penstock", "pool", "test", pool, "--json"))
    assert proved["passes"], proved
    assert len(proved["checks"]) > 10
    examined = json.loads(installed.said("penstock", "doctor", pool, "--json"))
    [finding] = [one for one in examined["findings"] if one["check"] == "registered"]
    assert "sqlite://" in finding["message"]


def test_what_is_missing_is_said(installed: Environment) -> None:
    done = installed.run("penstock", "pool", "stats", "mooncake://127.0.0.1:1")
    assert done.returncode == 2
    assert "mooncake-transfer-engine" in done.stderr
    done = installed.run("penstock", "pool", "stats", "nobody://x")
    assert done.returncode == 2
    assert "sqlite:// (penstock-store-sqlite 0.1.0)" in done.stderr
