"""The example with two engines, run as a reader runs it, prints what its page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.said import EXAMPLES, said

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

HANGS = 840.0
"""Seconds: less than the limit that the stages have for a test."""


def test_two_engines(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "two_engines.py"],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr
    # vLLM's native libraries may say something there, too.
    assert done.stdout.endswith(said()["two_engines.py"]), done.stdout + done.stderr
