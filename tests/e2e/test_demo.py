"""The demo on the real vLLM: it measures what it says, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from lab.waiting import eventually
from tests import watched as watching
from tests.dashboard import prometheus_needed, targets
from tests.e2e import patient
from tests.terminal import shown_in_terminal
from tests.watched import (
    PENSTOCK,
    START_SECONDS,
    STOP_SECONDS,
    WHOLE_SECONDS,
    WatchedDemo,
    processes_in,
    start_demo,
)

# Two real servers, and what watches them: several cores' work, and 7 GB.
pytestmark = [pytest.mark.e2e, pytest.mark.alone]

UNTIL_STORED = """
import time

import penstock
import lab.demo.measure as measuring
from lab.demo.engine import Engine
from lab.demo.replay import chain

pools, brought = [], set()
start, complete = measuring._start_engines, Engine.complete


def started(model, pool, *others):
    pools.append(pool)
    return start(model, pool, *others)


def stored(self, prompt, max_tokens, *others):
    answer = complete(self, prompt, max_tokens, *others)
    if "without" in self.name:
        return answer
    said = [*prompt, *answer.tokens]
    brought.update(chain(said[:-1]))
    end = time.monotonic() + 240
    while True:
        with penstock.open(pools[0]) as pool:
            found = max((each.objects for each in pool.namespaces()), default=0)
        if found >= len(brought):
            return answer
        assert time.monotonic() < end, (found, len(brought))
        # With its next request an engine stores what it could not store before.
        complete(self, said[:-1], 1)


measuring._start_engines, Engine.complete = started, stored
"""
"""The next question is asked when the pool has all of the last one."""


@pytest.fixture(scope="module", autouse=True)
def patient_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests start is patient."""
    program = patient.program(tmp_path_factory.mktemp("program"), UNTIL_STORED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "DEMO", program)
        yield


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: vLLM's unix sockets lie in it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def running_in(folder: Path) -> list[str]:
    """The names of the processes that run in `folder`."""
    found = []
    for process in processes_in(folder):
        with contextlib.suppress(psutil.Error):
            found.append(process.name())
    return found


def wait_until(condition: Callable[[], bool], demo: subprocess.Popen[str]) -> None:
    def holds() -> bool:
        assert demo.poll() is None, demo.communicate()[1]
        return condition()

    eventually(holds, seconds=START_SECONDS)


@dataclass(frozen=True)
class Seen:
    """What a demo said, and what was seen of its servers meanwhile."""

    figures: dict[str, Any]
    page: str
    left: list[str]
    """Names of processes that it left behind."""
    top: list[dict[str, Any]]
    """What `penstock top --json` said."""
    terminal: str
    """What `penstock top` showed in a terminal."""
    answers: list[tuple[str, str, list[float]]]
    """Of each query of the dashboard: its panel's title, the query, and the values found."""
    saved: float
    """Seconds of prefill that loads have saved, by the servers' counters."""


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    """One demo, for all tests that look at it from another side."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = folder / "report" / "index.html"
        with WatchedDemo(folder, "--report", str(page)) as watched:
            # A server that does not answer within the interval counts as gone.
            often = ("--interval", "20")
            with watched.paused():
                command = watched.top("--json", "--count", "2", *often)
                top = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                terminal = shown_in_terminal(140, watched.top("--count", "1", *often))
            figures, _ = watched.finish()
            # All that happened, however long it took.
            seconds = max(120, math.ceil(time.time() - watched.began) + 10)
            answers = [
                (title, query, [float(each["value"][1]) for each in found])
                for title, query in targets(f"{seconds}s")
                if [(found := watched.prometheus.query(query))]
            ]
            [saved] = watched.prometheus.query(
                f"sum(last_over_time(vllm:penstock_prefill_saved_seconds_total[{seconds}s]))"
            )
        readings = [json.loads(line) for line in top.splitlines()]
        left = running_in(folder)
        seconds_saved = float(saved["value"][1])
        yield Seen(figures, page.read_text(), left, readings, terminal, answers, seconds_saved)


def test_a_turn_on_the_other_server_loads_what_the_first_computed(seen: Seen) -> None:
    figures = seen.figures
    assert figures["failures"] == []
    assert figures["outputs_equal"] == figures["requests"] == 12
    other_node = figures["time_to_first_token"]["warm on the other node"]
    # All whole blocks of the first turn's prompt and answer but at most one, in each conversation.
    assert other_node["loaded_tokens"] > other_node["prompt_tokens"] - 4 * 300
    assert figures["loaded_bytes"] >= other_node["loaded_tokens"] * 8 * 4 * 64 * 2 * 4
    assert figures["stored_bytes"] >= figures["loaded_bytes"]
    assert "<svg" in seen.page
    assert seen.left == []


UNWEIGHED = "Loads to what was expected of them"
"""A panel that tells of loads which were weighed."""


@prometheus_needed
def test_every_query_of_the_dashboard_has_data_of_real_servers(seen: Seen) -> None:
    assert len(seen.answers) == len(targets())
    assert [query for _, query, values in seen.answers if not values] == []
    # A demo loads nothing from host memory: what such a load takes is not known. Who always loads
    # expects nothing of a load. All else is known.
    unknown = {title for title, _, values in seen.answers if any(map(math.isnan, values))}
    assert unknown <= {"Loads, by tier", UNWEIGHED}
    assert not any(
        all(map(math.isnan, values)) for title, _, values in seen.answers if title != UNWEIGHED
    )
    values = {(title, query): values for title, query, values in seen.answers}
    for (title, query), found in values.items():
        if title.startswith("Failures"):
            assert set(found) == {0}, query
        elif title == "Tokens that came from the pool":
            assert found[0] > 0, (query, found)
    # What is left of it after the waits is the machine's to say.
    assert seen.saved > 0


def test_top_sees_the_demos_servers(seen: Seen) -> None:
    assert len(seen.top) == 2
    engines = seen.top[1]["engines"]
    assert len(engines) == 2
    assert all("error" not in each for each in engines.values())
    assert sum(each["failures"] for each in engines.values()) == 0
    assert "2 of 2 answer" in seen.terminal
    assert "gone" not in seen.terminal


def write_trace(path: Path) -> None:
    """Two agents that work at once; each of their prompts continues the one before."""
    requests = []
    for turn in range(3):
        for session in range(2):
            text = "You are an agent.\n" * 30 + f"Task {session}: " + "look at it again. " * 40
            text += "".join(f"Step {step}: " + "nothing found. " * 30 for step in range(turn))
            moment = (2 * turn + session) * 1_000_000
            request = {"timestamp": moment, "session_id": f"{session}", "input": text}
            requests.append(json.dumps({**request, "output": "ok"}))
    path.write_text("\n".join(requests))


def test_a_trace_finds_what_the_simulator_says(folder: Path) -> None:
    write_trace(folder / "trace.jsonl")
    sent = folder / "sent.jsonl"
    demo = start_demo(
        folder, "--requests", str(sent), material=("--trace", str(folder / "trace.jsonl"))
    )
    out, err = demo.communicate(timeout=WHOLE_SECONDS)
    assert demo.returncode == 0, err
    figures = json.loads(out)
    assert figures["outputs_equal"] == figures["requests"] == 6
    hits = figures["hit_ratio"]
    assert hits["simulated"] > 0.5
    # All that can be loaded is: how much of it pays is the machine's to say.
    assert (hits["declined"], hits["late"]) == (0, 0)
    assert hits["found"] == pytest.approx(hits["simulated"], abs=0.01)
    command = [PENSTOCK, "simulate", str(sent), "--block-tokens", "128", "--json", "--no-sizes"]
    options = ["--bytes-per-token", "16KiB", "--nodes", "2", "--pool-bytes", "1GiB"]
    told = json.loads(subprocess.check_output([*command, *options], text=True))
    total = told["outcomes"]["shared pool"]["total"]
    assert total["pool_blocks"] / total["blocks"] == pytest.approx(hits["simulated"])


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM]
)
def test_a_signal_leaves_no_process_behind(folder: Path, number: signal.Signals) -> None:
    demo = start_demo(folder)

    # vLLM's engine is a process below its server: with it the tree is as deep as it gets.
    def engines_are_up() -> bool:
        return sum(name.startswith("VLLM::") for name in running_in(folder)) >= 2

    wait_until(engines_are_up, demo)
    demo.send_signal(number)
    _, err = demo.communicate(timeout=STOP_SECONDS)
    assert demo.returncode == 128 + number, err
    assert "no server is left" in err
    assert running_in(folder) == []
    assert list(folder.iterdir()) == []
