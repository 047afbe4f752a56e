"""Workloads: what is asked, of which node, in which order."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest

from lab.demo import workload
from lab.models.chat import BEGIN
from penstock.errors import ConfigError


def write_trace(path: Path, *requests: tuple[int, str, str, str]) -> Path:
    """A trace of (timestamp, session, input, output)."""
    lines = "".join(
        json.dumps({"timestamp": at, "session_id": session, "input": asked, "output": said}) + "\n"
        for at, session, asked, said in requests
    )
    raw = lines.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def test_conversations_are_the_same_every_time_and_change_nodes_with_every_turn() -> None:
    asked = workload.documents(3)
    assert asked == workload.documents(3)
    for conversation in range(3):
        steps = [step for step in asked.steps if step.conversation == conversation]
        assert [step.turn for step in steps] == [0, 1, 2]
        assert all(one.node != next_.node for one, next_ in itertools.pairwise(steps))
        assert [step.follows for step in steps] == [False, True, True]
    assert {step.node for step in asked.steps if step.turn == 0} == {0, 1}


def test_documents_are_long_and_differ_from_their_beginning() -> None:
    openings = [step.tokens for step in workload.documents(8).steps if step.turn == 0]
    assert all(1_500 < len(opening) < 2_500 for opening in openings)
    assert len({opening[:128] for opening in openings}) == len(openings) == 8


@pytest.mark.parametrize("count", [0, 1000])
def test_a_count_of_conversations_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="conversations"):
        workload.documents(count)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_is_replayed_in_the_order_of_its_timestamps(tmp_path: Path, name: str) -> None:
    path = write_trace(
        tmp_path / name,
        (30, "one", "first, second", "answer"),
        (10, "one", "first", "x" * 500),
        (20, "two", "other", ""),
    )
    steps = workload.trace(path).steps
    assert [bytes(step.tokens[1:]).decode() for step in steps] == [
        "first",
        "other",
        "first, second",
    ]
    assert all(step.tokens[0] == BEGIN and not step.follows for step in steps)
    assert [(step.conversation, step.turn) for step in steps] == [(0, 0), (1, 0), (0, 1)]
    assert steps[0].node != steps[2].node
    # As long as the recorded answer, within bounds: an empty one still needs a token to compare.
    assert [step.answer_tokens for step in steps] == [24, 1, 6]


def test_requests_of_a_trace_pause_as_recorded_but_not_for_long(tmp_path: Path) -> None:
    moments = [5_000_000, 5_250_000, 95_250_000]
    requests = [(moment, "one", f"asked at {moment}", "yes") for moment in moments]
    asked = workload.trace(write_trace(tmp_path / "trace.jsonl", *requests))
    assert [step.pause for step in asked.steps] == [0.0, 0.25, 1.0]
    assert "pauses between requests are cut to 1 s" in asked.cuts


def test_what_a_trace_loses_is_told(tmp_path: Path) -> None:
    long = "abcdefgh" * 4_000
    requests = [(n, f"session {n % 20}", f"{n % 20} {long} {n}", "yes") for n in range(400)]
    asked = workload.trace(write_trace(tmp_path / "trace.jsonl", *requests))
    assert sum(len(step.tokens) for step in asked.steps) <= 120_000
    assert len({step.tokens for step in asked.steps}) == len(asked.steps)
    told = "; ".join(asked.cuts)
    assert f"{len(asked.steps)} of 400 requests" in told
    assert "cut to their first" in told
    assert "answers" in told


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no requests"),
        (b"not json\n", "line 1"),
        (b'\n{"timestamp": 1, "input": "", "output": ""}\n', "line 2"),
        (b"[1]\n", "line 1"),
        (b"\x1f\x8bnot gzip", "cannot be read"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_place(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        workload.trace(path)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        workload.trace(tmp_path / "none")
