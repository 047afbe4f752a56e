"""Commits that pages name are in the history, and have the benches that pages measured there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMIT = re.compile(r"(?<![.\w])(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b")
BENCH = re.compile(r"\bpython3? -m (benches\.\w+)")


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def has_history() -> bool:
    """Whether this is a checkout with all its commits, and not an archive or a shallow clone."""
    said = git("rev-parse", "--is-shallow-repository")
    return said.returncode == 0 and said.stdout.strip() == "false"


def paragraphs() -> Iterator[tuple[str, str]]:
    """The paragraphs of all pages, each with where it is."""
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        for text in path.read_text().split("\n\n"):
            yield str(path.relative_to(ROOT)), text


def wrong(place: str, text: str) -> list[str]:
    """What a paragraph says of commits and benches that is not so."""
    commits = COMMIT.findall(text)
    found = [
        f"{place}: {commit} is no commit of this repository"
        for commit in commits
        if git("cat-file", "-e", f"{commit}^{{commit}}").returncode
    ]
    for bench in set(BENCH.findall(text)):
        file = f"{bench.replace('.', '/')}.py"
        if (ROOT / file).exists():
            continue
        if all(git("cat-file", "-e", f"{commit}:{file}").returncode for commit in commits):
            found.append(
                f"{place}: {bench} is neither here nor at a commit that is named beside it"
            )
    return found


@pytest.mark.skipif(not has_history(), reason="no history here, or not all of it")
def test_pages_name_commits_and_benches_that_there_are() -> None:
    assert [fault for place, text in paragraphs() for fault in wrong(place, text)] == []


@pytest.mark.skipif(not has_history(), reason="no history here, or not all of it")
@pytest.mark.parametrize(
    "text",
    [
        "measured at commit 0badbad with `python -m benches.gil`",
        "measured with `python -m benches.lock_waits`",
        "measured at b43f3f2 with `python -m benches.lock_waits`",
    ],
)
def test_what_is_not_there_is_seen(text: str) -> None:
    assert wrong("a page", text) != []
