"""Every command's help, and what becomes of wrong calls, are as the golden pages say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.golden import page

ANEW = "`python -m tests.cli.golden --write` makes all pages anew; read what it changed"

pytestmark = [
    pytest.mark.long,
    # Hundreds of calls, which the first test waits for.
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11), reason="argparse words its messages in other ways"
    ),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of the commands as they are, in a folder."""
    folder = tmp_path_factory.mktemp("golden")
    # In a process of its own, because it forks one for each call.
    command = [sys.executable, "-m", "tests.cli.golden", "--write", "--to", str(folder)]
    maker = subprocess.run(command, capture_output=True, text=True)
    assert maker.returncode == 0, maker.stderr
    return folder


@pytest.mark.parametrize("command", page.commands())
def test_a_command_is_as_its_page_says(command: str, made: Path) -> None:
    golden = page.path(command)
    assert golden.exists(), f"`penstock {command}` has no page: {ANEW}"
    # pytest shows the lines that differ.
    assert page.path(command, made).read_text() == golden.read_text(), ANEW


def test_no_page_is_of_a_command_that_is_gone() -> None:
    assert set(page.FOLDER.glob("*.txt")) == set(map(page.path, page.commands()))
