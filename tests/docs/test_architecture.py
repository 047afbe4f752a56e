"""The house is built as ARCHITECTURE.md draws it: what a room imports lies beneath it."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/penstock"
LAB = ROOT / "lab"
COMMON = ""
"""The room of the files that lie in none."""


def drawn(prefix: str) -> list[list[str]]:
    """The rooms of a part of the house, floor by floor, the highest first."""
    floors = re.findall(rf"^{prefix}(\S+)", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return [floor.strip("{}").split(",") for floor in floors]


@pytest.mark.parametrize("package", [PACKAGE, LAB], ids=lambda path: path.name)
def test_what_python_rooms_import_lies_beneath_them(package: Path) -> None:
    floors = [
        [COMMON] if rooms == ["*.py"] else rooms for rooms in drawn(f"{package.relative_to(ROOT)}/")
    ]
    height = {room: -floor for floor, rooms in enumerate(floors) for room in rooms}
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    native = {"_native"} if package == PACKAGE else set()
    assert set(height) == rooms | {COMMON} | native
    wrong = [
        f"{path.relative_to(ROOT)} imports {package.name}.{name}"
        for path in package.rglob("*.py")
        # The package's face names what it gives to users.
        if path != package / "__init__.py"
        for name in imported(path, package)
        if name in height and name != (room := room_of(path, package))
        if height[name] >= height[room]
    ]
    assert wrong == []


ABOVE = ("lab", "benches", "tests")
"""What is not in the wheel: the laboratory, the benches that stand on it, the tests of all."""


def test_package_laboratory_and_benches_know_nothing_above_them() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {top}"
        for number, folder in enumerate((PACKAGE, LAB, ROOT / "benches"))
        for path in folder.rglob("*.py")
        for top in tops(path)
        if top in ABOVE[number:]
    ]
    assert wrong == []


def test_what_crates_depend_on_lies_beneath_them() -> None:
    crates = [name for (name,) in drawn("crates/")]
    assert {f"crates/{name}" for name in crates} | {"crates/penstock-py"} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "crates").iterdir()
    }
    for number, name in enumerate(crates):
        manifest = tomllib.loads((ROOT / "crates" / name / "Cargo.toml").read_text())
        # A crate's tests may know more.
        known = {other for other in manifest.get("dependencies", {}) if "penstock-" in other}
        assert known <= set(crates[number + 1 :]), name


def folders() -> list[Path]:
    """The folders of modules in all crates, but for those of tests."""
    inside = {path.parent for path in ROOT.glob("crates/*/src/**/*.rs")}
    return sorted(path for path in inside if not {"tests", "bin"} & set(path.parts))


@pytest.mark.parametrize("folder", folders(), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_of_a_folder_know_each_other_in_one_direction(folder: Path) -> None:
    arrows = module_arrows(folder)
    in_circles = sorted(name for name in arrows if name in reached(name, arrows))
    assert in_circles == []


def test_arrows_between_modules_are_seen() -> None:
    lane = module_arrows(ROOT / "crates/penstock-engine/src/lane")
    assert {"delivery", "fetching", "in_place"} <= lane["node"]
    assert "arena" in module_arrows(ROOT / "crates/penstock-engine/src")["lane"]


def module_arrows(folder: Path) -> dict[str, set[str]]:
    """Which modules each module of a folder, with its submodules, names outside its tests."""
    source = next(path for path in (folder, *folder.parents) if path.name == "src")
    own = "::".join(("crate", *folder.relative_to(source).parts))
    faces = (folder / "lib.rs", folder / "mod.rs", folder.with_suffix(".rs"))
    face = next(path for path in faces if path.exists()).read_text()
    exported = re.findall(r"use (?:crate::)?(\w+)::(?:\w+::)*(\w+|\{[^}]*\});", face)
    home = {name: module for module, names in exported for name in re.findall(r"\w+", names)}
    arrows: dict[str, set[str]] = {}
    for path in folder.rglob("*.rs"):
        inside = path.relative_to(folder).with_suffix("").parts
        if inside in (("lib",), ("mod",)) or {"tests", "loom_models", "fuzz"} & set(inside):
            continue
        text = re.split(r"^#\[cfg\((?:all\()?test", path.read_text(), flags=re.M)[0]
        code = re.sub(r"^\s*//.*", "", text, flags=re.M)
        up = "super::" * (len(inside) - (inside[-1] == "mod"))
        here = rf"(?<!\w)(?:{own}::|(?<!super::){up})"
        listed = [n for names in re.findall(here + r"\{([^;]*)\};", code) for n in heads(names)]
        names = {*listed, *re.findall(here + r"(\w+)", code)}
        arrows.setdefault(inside[0], set()).update(home.get(name, name) for name in names)
    return {module: (named & arrows.keys()) - {module} for module, named in arrows.items()}


def heads(names: str) -> list[str]:
    """The first part of each name in a list that may hold lists.

    >>> heads("a::B, c::{d, e}, F")
    ['a', 'c', 'F']
    """
    while "{" in names:
        names = re.sub(r"\{[^{}]*\}", "", names)
    return re.findall(r"(?:^|,)\s*(\w+)", names)


def reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = arrows[left.pop()] - found
        found |= new
        left += new
    return found


def room_of(path: Path, package: Path) -> str:
    inside = path.relative_to(package).parts
    return inside[0] if len(inside) > 1 else COMMON


def imported(path: Path, package: Path) -> list[str]:
    """The parts of the package that a file imports, wherever in the file."""
    parts = [name.split(".") for name in names(path)]
    return [part[1] for part in parts if part[0] == package.name and len(part) > 1]


def tops(path: Path) -> set[str]:
    """The packages that a file imports from, wherever in the file."""
    return {name.partition(".")[0] for name in names(path)}


def names(path: Path) -> list[str]:
    """The names that a file imports, with their packages."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found
