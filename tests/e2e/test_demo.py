"""The demo on the real vLLM: it measures what it says, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
START_SECONDS = 420.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: vLLM's unix sockets lie in it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def start_demo(folder: Path, *options: str) -> subprocess.Popen[str]:
    """A demo that runs in `folder`, and so does everything that it starts."""
    return subprocess.Popen(
        [PENSTOCK, "demo", "--conversations", "1", "--json", *options],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def running_in(folder: Path) -> list[str]:
    """The names of the processes that run in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(process.name())
        except psutil.Error:
            continue
    return found


def wait_until(condition: Callable[[], bool], demo: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert demo.poll() is None, demo.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_turn_on_the_other_server_loads_what_the_first_computed(folder: Path) -> None:
    page = folder / "report" / "index.html"
    demo = start_demo(folder, "--report", str(page))
    out, err = demo.communicate(timeout=580)
    assert demo.returncode == 0, err
    figures = json.loads(out)
    assert figures["failures"] == []
    assert figures["outputs_equal"] == figures["requests"] == 3
    other_node = figures["time_to_first_token"]["warm on the other node"]
    # All whole blocks of the first turn's prompt and answer but at most one.
    assert other_node["loaded_tokens"] > other_node["prompt_tokens"] - 300
    assert figures["loaded_bytes"] >= other_node["loaded_tokens"] * 8 * 4 * 64 * 2 * 4
    assert figures["stored_bytes"] >= figures["loaded_bytes"]
    assert "<svg" in page.read_text()
    assert running_in(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_behind(folder: Path, number: signal.Signals) -> None:
    demo = start_demo(folder)

    # vLLM's engine is a process below its server: with it the tree is as deep as it gets.
    def engines_are_up() -> bool:
        return sum(name.startswith("VLLM::") for name in running_in(folder)) >= 2

    wait_until(engines_are_up, demo)
    demo.send_signal(number)
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 128 + number, err
    assert "no server is left" in err
    assert running_in(folder) == []
    assert list(folder.iterdir()) == []
