"""The Containerfile builds from files that there are. No container engine is needed here."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.vllm.compat.versions import SUPPORTED

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/container/Containerfile"


def instructions() -> list[tuple[str, str]]:
    """Each instruction with what follows it, comments left out, lines joined."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)
    ]


def copies() -> list[tuple[list[str], str]]:
    """What is copied from the repository, and whereto."""
    split = [shlex.split(rest) for word, rest in instructions() if word == "COPY"]
    return [(words[:-1], words[-1]) for words in split if not words[0].startswith("--")]


def test_instructions_are_known() -> None:
    known = {"ARG", "COPY", "ENTRYPOINT", "FROM", "RUN", "WORKDIR"}
    assert {word for word, _ in instructions()} == known
    images = dict(rest.split("=") for word, rest in instructions() if word == "ARG")
    # Without a tag, an image is another one tomorrow.
    assert all(":" in image for image in images.values())
    assert re.search(r":v(\d+\.\d+)\.", images["VLLM_IMAGE"])[1] in SUPPORTED
    rust = re.search(r"rust:(\d+\.\d+)", images["RUST_IMAGE"])[1]
    oldest = re.search(r'^rust-version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    assert [*map(int, rust.split("."))] >= [*map(int, oldest.split("."))]


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A folder with what the first stage has."""
    for sources, target in copies():
        for name in sources:
            source, whereto = ROOT / name, tmp_path / target
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(source, whereto, ignore=ignored)
            else:
                whereto.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, whereto)
    return tmp_path


def test_all_that_a_wheel_takes_is_copied(stage: Path) -> None:
    for command in (
        ["cargo", "metadata", "--offline", "--locked", "--format-version=1"],
        ["maturin", "sdist", "--out", str(stage / "dist")],
    ):
        said = subprocess.run(command, cwd=stage, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
    [_] = (stage / "dist").iterdir()
    for word, rest in instructions():
        for name in re.findall(r"\b(?:scripts|requirements)/\S+", rest) if word == "RUN" else []:
            assert (stage / name).exists()
