"""A small matrix of `benches.exactness`: a few hits of each fault."""

from __future__ import annotations

import argparse

import pytest
from benches import exactness
from benches.exact.faults import FAULTS

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("family", ["lfm2", "eagle"])
def test_no_hit_differs(family: str) -> None:
    """Hits, and what was computed or had to be rejected, are as vLLM has them by itself."""
    args = argparse.Namespace(
        families=[family],
        pools=["file"],
        faults=list(FAULTS),
        hits=8,
        seconds=120.0,
        device="cpu",
        engine=[],
        logs=None,
    )
    rows = exactness.measure(args)
    assert [each["fault"] for each in rows] == list(FAULTS)
    for each in rows:
        assert "failure" not in each, each
        assert each["hits"] > 0, each
        assert each["hits_differ"] == each["rejected_differ"] == each["computed_differ"] == 0, each
    if family == "eagle":
        assert sum(each["seen"]["drafted_tokens"] for each in rows) > 0
