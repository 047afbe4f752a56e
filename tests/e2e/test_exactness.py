"""A small matrix of `benches.exactness`: a few hits of each fault."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benches import exactness
from benches.exact.faults import FAULTS
from lab.engines.async_on_cpu import ASYNCHRONOUS, RUNS_AHEAD

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "family",
    ["eagle", *(pytest.param(name, marks=pytest.mark.full) for name in ("lfm2", "llama, ahead"))],
)
def test_no_hit_differs(family: str, tmp_path: Path) -> None:
    """Hits, and what was computed or had to be rejected, are as vLLM has them by itself. With the
    Llama, a step is scheduled while the one before still runs."""
    family, _, runs_ahead = family.partition(", ")
    args = argparse.Namespace(
        families=[family],
        pools=["file"],
        faults=list(FAULTS),
        hits=5,
        seconds=120.0,
        device="cpu",
        engine=list(ASYNCHRONOUS.items()) if runs_ahead else [],
        logs=tmp_path,
    )
    rows = exactness.measure(args)
    assert [each["fault"] for each in rows] == list(FAULTS)
    for each in rows:
        assert "failure" not in each, each
        assert each["hits"] > 0, each
        assert each["hits_differ"] == each["rejected_differ"] == each["computed_differ"] == 0, each
    said = [log.read_text() for log in tmp_path.rglob("*.log")]
    assert len(said) > 3
    assert {RUNS_AHEAD in each for each in said} == {bool(runs_ahead)}
    if family == "eagle":
        assert sum(each["seen"]["drafted_tokens"] for each in rows) > 0
