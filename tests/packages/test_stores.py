"""The examples of stores, as their authors would have them: built, installed, proved."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packages.conftest import ROOT, Environment, uv

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def target() -> str:
    """Where Cargo builds the example in Rust, which has a workspace of its own."""
    return str(Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "examples-of-stores")


@pytest.fixture(scope="module")
def installed(
    wheel: Path,
    target: str,
    make_environment: Callable[..., Environment],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch_module: pytest.MonkeyPatch,
) -> Environment:
    """Penstock's wheel and those of both examples, and nothing else."""
    monkeypatch_module.setenv("CARGO_TARGET_DIR", target)
    folder = tmp_path_factory.mktemp("stores")
    for example in ("store-python", "store-rust"):
        uv("build", "--quiet", "--wheel", "--out-dir", str(folder), str(EXAMPLES / example))
    return make_environment(str(wheel), *map(str, folder.glob("*.whl")))


@pytest.fixture(scope="module")
def monkeypatch_module() -> pytest.MonkeyPatch:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_the_example_in_rust_passes_its_own_tests(target: str) -> None:
    for command in (["fmt", "--check"], ["test", "--release", "--quiet", "--locked"]):
        done = subprocess.run(
            ["cargo", *command],
            cwd=EXAMPLES / "store-rust",
            env=os.environ | {"CARGO_TARGET_DIR": target},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_both_are_found_and_told_apart(installed: Environment) -> None:
    listed = json.loads(installed.said("penstock", "pool", "schemes", "--json"))
    kinds = {store["scheme"]: (store["distribution"], store["kind"]) for store in listed}
    assert kinds["lmdb"] == ("penstock-store-lmdb 0.1.0", "library")
    assert kinds["sqlite"] == ("penstock-store-sqlite 0.1.0", "program")
    assert kinds["mooncake"][1] == "program"
    assert [store["problem"] for store in listed] == [""] * 3


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_each_does_what_every_store_must_do(
    installed: Environment, scheme: str, tmp_path: Path
) -> None:
    pool = f"{scheme}://{tmp_path}/pool?size=256MiB"
    proved = json.loads(installed.said("penstock", "pool", "test", pool, "--json"))
    assert proved["passes"], proved
    assert len(proved["checks"]) > 10
    examined = json.loads(installed.said("penstock", "doctor", pool, "--json"))
    [finding] = [one for one in examined["findings"] if one["check"] == "registered"]
    assert f"{scheme}://" in finding["message"]


def test_what_is_missing_is_said(installed: Environment) -> None:
    done = installed.run("penstock", "pool", "stats", "mooncake://127.0.0.1:1")
    assert done.returncode == 2
    assert "mooncake-transfer-engine" in done.stderr
    done = installed.run("penstock", "pool", "stats", "nobody://x")
    assert done.returncode == 2
    assert "lmdb:// (penstock-store-lmdb 0.1.0)" in done.stderr
