"""Another version of vLLM over the compiled files of the environment: what lies there."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/vllm-version.sh"

PYTHON = """#!/bin/bash
if [[ $1 == -I ]]; then
    echo "{compiled}"
else
    echo fetched >> "{fetches}"
    cp "{archive}" "${{@: -1}}"
fi
"""
"""Stands in for the environment's: tells where vLLM is, and fetches its source distribution."""


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """The environment's vLLM. Beside it, a virtual environment with the Python above."""
    compiled, archive = tmp_path / "compiled/vllm", tmp_path / "vllm.tar.gz"
    (compiled / "deep").mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as made:
        found = tarfile.TarInfo("vllm-0.33.0/vllm/__init__.py")
        found.size = len(b"new = True")
        made.addfile(found, io.BytesIO(b"new = True"))
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    fetches = tmp_path / "fetches"
    python.write_text(PYTHON.format(compiled=compiled, archive=archive, fetches=fetches))
    python.chmod(0o755)
    return compiled


def laid(tmp_path: Path) -> dict[str, str]:
    """What a command finds, run with the version."""
    done = subprocess.run(
        [SCRIPT, tmp_path / "venv", "0.33.0", sys.executable, "-c", "import sys; print(sys.path)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    folder = tmp_path / "venv/vllm-0.33.0"
    assert str(folder) in done.stdout
    found = (path for path in (folder / "vllm").rglob("*") if path.is_file())
    return {str(path.relative_to(folder / "vllm")): path.read_text() for path in found}


def test_the_compiled_files_are_those_of_the_environment_now(
    compiled: Path, tmp_path: Path
) -> None:
    (compiled / "_C.abi3.so").write_text("first")
    (compiled / "deep/old.so").write_text("old")
    (compiled / "__init__.py").write_text("new = False")
    python = {"__init__.py": "new = True"}
    for _ in range(2):
        assert laid(tmp_path) == python | {"_C.abi3.so": "first", "deep/old.so": "old"}
    # Another build is installed.
    (compiled / "deep/old.so").unlink()
    (compiled / "_C.abi3.so").write_text("of another length")
    assert laid(tmp_path) == python | {"_C.abi3.so": "of another length"}
    assert (tmp_path / "fetches").read_text() == "fetched\n"
    # As before this was known.
    (tmp_path / "venv/vllm-0.33.0/.build").unlink()
    (tmp_path / "venv/vllm-0.33.0/vllm/_C.abi3.so").write_text("stale")
    assert laid(tmp_path) == python | {"_C.abi3.so": "of another length"}
