"""The source distribution holds all that a build takes."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

import penstock
from tests.packages.conftest import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def unpacked(source_distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(source_distribution) as archive:
        archive.extractall(folder, filter="data")
    [root] = folder.iterdir()
    assert root.name == f"penstock-{penstock.__version__}"
    return root


def test_every_source_is_in_it_as_it_is(unpacked: Path) -> None:
    sources = [path for path in (ROOT / "crates").glob("*/src/**/*") if path.is_file()]
    sources += [
        path
        for path in (ROOT / "python/penstock").rglob("*")
        if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts
    ]
    sources += [ROOT / name for name in ("Cargo.lock", "LICENSE", "README.md")]
    missing = [path for path in sources if not (unpacked / path.relative_to(ROOT)).exists()]
    assert missing == []
    changed = [
        path
        for path in sources
        if (unpacked / path.relative_to(ROOT)).read_bytes() != path.read_bytes()
    ]
    assert changed == []


def test_nothing_that_was_built_is_in_it(unpacked: Path) -> None:
    assert not [*unpacked.rglob("*.so"), *unpacked.rglob("__pycache__"), *unpacked.glob("target")]


def test_cargo_finds_every_crate_without_the_repository(unpacked: Path) -> None:
    said = subprocess.run(
        ["cargo", "metadata", "--offline", "--locked", "--format-version=1"],
        cwd=unpacked,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    ours = {
        each["name"]: each
        for each in json.loads(said.stdout)["packages"]
        if each["name"].startswith("penstock")
    }
    assert set(ours) == {path.name for path in (ROOT / "crates").iterdir()}
    assert {each["version"] for each in ours.values()} == {penstock.__version__}
    assert all(Path(each["manifest_path"]).is_relative_to(unpacked) for each in ours.values())
    # The release profile is the workspace's.
    assert '[profile.release]\nlto = "thin"' in (unpacked / "Cargo.toml").read_text()
