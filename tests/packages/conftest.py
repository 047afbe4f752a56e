"""The wheel and the source distribution, made once, and environments to use them in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment whose programs find nothing but each other: no Rust, no compiler."""

    folder: Path
    home: Path

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    def run(self, program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        """Runs a program of the environment, in an empty folder."""
        return subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.home,
            env={"PATH": str(self.programs), "HOME": str(self.home), **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def said(self, program: str, *arguments: str, **variables: str) -> str:
        """What a program prints that must succeed."""
        done = self.run(program, *arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def packages(self) -> dict[str, str]:
        """Name → version of all that is installed."""
        listed: list[dict[str, str]] = json.loads(
            uv("pip", "list", "--python", str(self.programs / "python"), "--format", "json")
        )
        return {each["name"]: each["version"] for each in listed}


def uv(*arguments: str) -> str:
    """uv, with the index that pip is configured with."""
    command = [str(ROOT / "scripts/uv.sh"), sys.prefix, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def maturin(*arguments: str, folder: Path = ROOT) -> None:
    """maturin, with the target folder of the environment's own build: nothing is built twice."""
    target = os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target"))
    command = [str(Path(sys.prefix) / "bin/maturin"), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"CARGO_TARGET_DIR": target, "CARGO_TERM_QUIET": "true"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    maturin("build", "--release", "--locked", "--out", str(folder))
    [made] = folder.iterdir()
    return made


@pytest.fixture(scope="session")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    maturin("sdist", "--out", str(folder))
    [made] = folder.iterdir()
    return made


@pytest.fixture(scope="session")
def make_environment(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Environment]:
    """make_environment(WHAT, python=…): an environment with WHAT, and what that asks for."""

    def make(*what: str, python: str = sys.executable) -> Environment:
        folder = tmp_path_factory.mktemp("environment")
        environment = Environment(folder / "venv", folder / "home")
        environment.home.mkdir()
        uv("venv", "--quiet", "--python", python, str(environment.folder))
        uv("pip", "install", "--quiet", "--python", str(environment.programs / "python"), *what)
        found = {name: shutil.which(name, path=str(environment.programs)) for name in RUST}
        assert not any(found.values()), found
        return environment

    return make


@pytest.fixture(scope="session")
def environment(wheel: Path, make_environment: Callable[..., Environment]) -> Environment:
    """The wheel alone, with no more than it asks for."""
    return make_environment(str(wheel))


RUST = ("cargo", "rustc", "maturin", "cc")


def imported(environment: Environment) -> dict[str, Any]:
    """What importing each module of Penstock fails for: the package that is missing, or None."""
    return dict(json.loads(environment.said("python", "-c", _IMPORT_ALL)))


_IMPORT_ALL = """
import importlib, json, pkgutil, sys, penstock
def missing(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return error.name
names = [each.name for each in pkgutil.walk_packages(penstock.__path__, "penstock.",
                                                     onerror=lambda name: None)]
json.dump({name: missing(name) for name in names}, sys.stdout)
"""
