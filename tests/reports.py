"""What a run says of tests that failed, before anything else: how to run each of them again.

Draws are the same in every run (`tests/conftest.py`), so the command is all that it takes.
"""

from __future__ import annotations

import shlex

import pytest


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
