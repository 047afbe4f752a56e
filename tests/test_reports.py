"""Who sees a failure sees how to have it again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reports import LINES, again

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError

@pytest.mark.parametrize("word", ["it's here", "fine"])
def test_some(word, tmp_path):
    lines = [f"{word} {n}" for n in range(100)]
    (tmp_path / "node.log").write_text("\\n".join(lines))
    assert word == "fine"

def test_whose_fixture_fails(broken):
    pass
"""


@pytest.mark.parametrize("options", [(), ("--numprocesses", "2")], ids=["alone", "with workers"])
def test_the_summary_begins_with_the_commands(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "tests.reports",
                "-p",
                "no:cacheprovider",
            ),
            *("--rootdir", str(tmp_path), *options, "test_it.py"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("again: ")]
    failed = ["test_it.py::test_some[it's here]", "test_it.py::test_whose_fixture_fails"]
    assert sorted(lines) == sorted(map(again, failed)), done.stdout
    first = done.stdout.index("again: ")
    assert first < done.stdout.index("short test summary info")
    # Of the test that failed, the end of its log.
    lines = done.stdout.splitlines()
    shown = [f"it's here {n}" in lines for n in range(100)]
    assert shown == [n >= 100 - LINES for n in range(100)]
    assert "node.log" in done.stdout


def test_the_command_is_one_for_a_shell() -> None:
    said = subprocess.run(
        ["sh", "-c", again("a.py::test[it's $HOME]").replace("again: python -m pytest", "echo")],
        capture_output=True,
        text=True,
    )
    assert said.stdout == "a.py::test[it's $HOME]\n"
