"""The examples, run as a reader runs them, print what their page says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.said import EXAMPLES, said
from tests.servers import Server


def printed(example: str, *arguments: str) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / example, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # Of a machine that stands still while it connects.
    return done.stdout.replace("no server: TimedOut", "no server: Unreachable")


def test_the_page_has_all_examples() -> None:
    assert sorted(said()) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("example", ["pool.py", "pool_async.py", "plan.py", "simulate.py"])
def test_an_example_prints_what_its_page_says(example: str) -> None:
    assert printed(example) == said()[example]


@pytest.mark.parametrize("example", ["pool.py", "pool_async.py"])
def test_the_pool_may_be_a_server(example: str, valkey_server: Server) -> None:
    assert printed(example, valkey_server.unix_url) == said()[example]


def test_the_trace_may_be_a_readers_own(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    request = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(request) + "\n")
    first, *pools = printed("simulate.py", str(trace)).splitlines()
    assert first == "1 requests, 1,024 tokens, 2 blocks"
    assert [line.partition(", ")[0] for line in pools] == [
        "8 GiB: 0.0% of blocks hit",
        "32 GiB: 0.0% of blocks hit",
    ]
