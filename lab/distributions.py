"""Distributions that bring stores: on the path, as if they were installed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

SQLITE = Path(__file__).parents[1] / "examples/store-python/src"
"""Where the module of the example's store lies."""


def bring(folder: Path, distribution: str, stores: Mapping[str, str], **modules: str) -> Path:
    """Makes a distribution that brings stores (scheme → value) with modules (name → source).
    Returns the folder to put on the path."""
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = [f"{scheme} = {value}" for scheme, value in stores.items()]
    (info / "entry_points.txt").write_text("\n".join(["[penstock.stores]", *lines, ""]))
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    return folder
