"""The scorer for routers, against the look-up service."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lab.pretended import BLOCK, Engine, hashes
from lab.waiting import LIMIT
from penstock._native import Store
from tests.lookup.test_http import TOKEN, Running

FILE = Path(__file__).parents[2] / "deploy/routing/scorer.py"


@pytest.fixture
def scorer() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("scorer", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "scorer", module)
        spec.loader.exec_module(module)
        yield module


def test_engines_are_scored_by_their_caches_and_their_pools(
    scorer: ModuleType, tmp_path: Path
) -> None:
    prompt = list(range(10 * BLOCK))
    url = f"file://{tmp_path}/pool?size=64MiB"
    store = Store.open(url)
    Engine(store).put(hashes(prompt)[:5])
    request = {"model": "llama", "prompt": prompt}
    candidates = {
        "empty": scorer.Candidate(store.url),
        "ahead of its pool": scorer.Candidate(store.url, cached_tokens=8 * BLOCK),
        "behind its pool": scorer.Candidate(store.url, cached_tokens=BLOCK),
        "without a pool": scorer.Candidate("", cached_tokens=BLOCK),
    }
    with Running(url, token=TOKEN) as running:
        asking = scorer.PoolScorer(running.said["url"], TOKEN, timeout=LIMIT, worth=0.5)
        scores = asking.scores(request, candidates)
        assert scores == {
            "empty": pytest.approx(0.25),
            "ahead of its pool": pytest.approx(0.8),
            "behind its pool": pytest.approx(0.3),
            "without a pool": pytest.approx(0.1),
        }
        refused = scorer.PoolScorer(running.said["url"], "wrong", timeout=LIMIT)
        own = {"empty": 0.0, "ahead of its pool": 0.8, "behind its pool": 0.1}
        own["without a pool"] = 0.1
        assert refused.scores(request, candidates) == pytest.approx(own)
    gone = scorer.PoolScorer(running.said["url"], TOKEN)
    assert gone.scores(request, candidates) == pytest.approx(own)
