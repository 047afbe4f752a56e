"""The version is written in one place, Cargo's workspace, and everything else agrees with it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import penstock
from penstock.cli import main

ROOT = Path(__file__).parents[2]


def workspace_version() -> str:
    table = (ROOT / "Cargo.toml").read_text().partition("[workspace.package]\n")[2]
    [version] = re.findall(r'^version = "(.*)"$', table.partition("\n[")[0], re.MULTILINE)
    return version


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_it_reads_the_same_to_cargo_and_to_python() -> None:
    """A pre-release would not: Cargo's `1.0.0-rc.1` is Python's `1.0.0rc1`."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", workspace_version())


def test_nothing_else_in_the_sources_has_a_version_of_its_own() -> None:
    for manifest in sorted(ROOT.glob("crates/*/Cargo.toml")):
        package = manifest.read_text().partition("[package]\n")[2].partition("\n[")[0]
        assert re.findall(r"^version.*$", package, re.MULTILINE) == ["version.workspace = true"]
    project = (ROOT / "pyproject.toml").read_text().partition("[project]\n")[2].partition("\n[")[0]
    assert re.findall(r"^.*\bversion\b.*$", project, re.MULTILINE) == ['dynamic = ["version"]']


def test_python_and_the_command_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert penstock.__version__ == workspace_version(), "the native module is of another version"
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"penstock {workspace_version()}\n")


def test_pages_that_show_it_agree() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    shown = {
        (str(page.relative_to(ROOT)), version)
        for page in pages
        for version in re.findall(r"\bpenstock[ -](\d+\.\d+\.\d+)", page.read_text())
    }
    assert shown
    assert {version for _, version in shown} == {workspace_version()}, shown


def test_the_changelog_is_in_order_and_not_ahead() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(\d+\.\d+\.\d+)\](.*)$", text, re.MULTILINE)
    found = [numbers(version) for version, _ in headings]
    assert found == sorted(set(found), reverse=True)
    assert all(version <= numbers(workspace_version()) for version in found)
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in headings)
    # Without a section of what is not released yet, all of it is: the newest version is this one.
    if "## [Unreleased]" not in text:
        assert found[:1] == [numbers(workspace_version())]


def test_cargo_agrees() -> None:
    """Cargo.lock is read, and would have to be written if it were of another version."""
    said = subprocess.run(
        ["cargo", "metadata", "--locked", "--offline", "--format-version=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    versions = set(re.findall(r'"name":"penstock[\w-]*","version":"([^"]*)"', said.stdout))
    assert versions == {workspace_version()}
