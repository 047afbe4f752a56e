"""What a run says of tests that failed: first of all how to run each of them again, and with each
the end of what its engines and servers logged.

Draws are the same in every run (`tests/conftest.py`), so the command is all that it takes.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

LINES = 60
"""So much of a log is shown: its folder may be gone when somebody reads the report."""

_BEGAN = pytest.StashKey[float]()


def again(nodeid: str) -> str:
    """The command that runs a test again."""
    return f"again: python -m pytest {shlex.quote(nodeid)}"


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says it first. With xdist, the reports of all workers are here."""
    stats = terminalreporter.stats
    nodes = [each.nodeid for kind in ("failed", "error") for each in stats.get(kind, ())]
    # A test may fail, and so may its fixtures after it.
    for nodeid in dict.fromkeys(nodes):
        terminalreporter.write_line(again(nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Puts logs into the report of what failed."""
    report = yield
    began = item.stash.setdefault(_BEGAN, call.start)
    if report.failed:
        factory: pytest.TempPathFactory = item.config._tmp_path_factory  # type: ignore[attr-defined]
        for log in _written(factory.getbasetemp(), began):
            lines = log.read_text(errors="replace").splitlines()[-LINES:]
            report.sections.append((f"end of {log}", "\n".join(lines)))
    return report


def _written(folder: Path, since: float) -> Iterator[Path]:
    """The logs that somebody wrote to since a time, in seconds of the Unix epoch; perhaps some that
    were written to a moment before, as the clock of files goes in steps."""
    for log in sorted(folder.rglob("*.log")):
        if log.is_file() and log.stat().st_mtime >= since - 1:
            yield log
