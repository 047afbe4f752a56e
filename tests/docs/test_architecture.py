"""The house is built as ARCHITECTURE.md draws it: what a room imports lies beneath it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/penstock"
COMMON = ""
"""The room of the files that lie in none."""


def drawn(prefix: str) -> list[list[str]]:
    """The rooms of a part of the house, floor by floor, the highest first."""
    floors = re.findall(rf"^{prefix}(\S+)", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return [floor.strip("{}").split(",") for floor in floors]


def test_what_python_rooms_import_lies_beneath_them() -> None:
    floors = [[COMMON] if rooms == ["*.py"] else rooms for rooms in drawn("python/penstock/")]
    height = {room: -floor for floor, rooms in enumerate(floors) for room in rooms}
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(height) == rooms | {COMMON, "_native"}
    wrong = [
        f"{path.relative_to(ROOT)} imports penstock.{name}"
        for path in PACKAGE.rglob("*.py")
        # The package's face names what it gives to users.
        if path != PACKAGE / "__init__.py"
        for name in imported(path)
        if name in height and name != room_of(path) and height[name] >= height[room_of(path)]
    ]
    assert wrong == []


def test_what_crates_depend_on_lies_beneath_them() -> None:
    crates = [name for (name,) in drawn("crates/")]
    assert {f"crates/{name}" for name in crates} | {"crates/penstock-py"} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "crates").iterdir()
    }
    for number, name in enumerate(crates):
        manifest = (ROOT / "crates" / name / "Cargo.toml").read_text()
        known = set(re.findall(r"^(penstock-\w+)", manifest, re.MULTILINE))
        assert known <= set(crates[number + 1 :]), name


def room_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE).parts
    return inside[0] if len(inside) > 1 else COMMON


def imported(path: Path) -> list[str]:
    """The parts of the package that a file imports, wherever in the file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in names]
    return [part[1] for part in parts if part[0] == "penstock" and len(part) > 1]
