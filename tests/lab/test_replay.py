"""What a prompt meets is worked out from what the nodes were sent before; whom it is sent to, and
when."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.demo.engine import Counters, Engine
from lab.demo.replay import (
    BLOCK_TOKENS,
    REST_SECONDS,
    Sightings,
    Situation,
    replay,
    warm_up,
)
from lab.demo.workload import documents
from penstock.completions import Answer
from tests.clock import Clock

DOCUMENT = tuple(n % 251 for n in range(20 * BLOCK_TOKENS + 5))


def test_a_conversation_that_changes_nodes() -> None:
    seen = Sightings()
    assert seen.situation(DOCUMENT, 0) is Situation.COLD
    assert seen.situation((*DOCUMENT, 1), 1) is Situation.OTHER_NODE
    assert seen.situation((*DOCUMENT, 1, 2), 0) is Situation.SAME_NODE
    assert seen.situation((*DOCUMENT, 1, 2), 1) is Situation.SAME_NODE


def test_answers_count_as_seen() -> None:
    seen = Sightings()
    seen.saw(DOCUMENT, 0)
    assert seen.situation((*DOCUMENT, 3), 1) is Situation.OTHER_NODE


def test_a_prefix_that_shares_no_whole_block_shares_nothing() -> None:
    seen = Sightings()
    seen.situation(DOCUMENT, 0)
    changed = (DOCUMENT[0] + 1, *DOCUMENT[1:])
    assert seen.situation(changed, 1) is Situation.COLD


@given(shared=st.integers(0, 20))
def test_the_largest_part_names_the_situation(shared: int) -> None:
    seen = Sightings()
    seen.situation(DOCUMENT[: shared * BLOCK_TOKENS], 0)
    met = seen.situation(DOCUMENT, 1)
    rest = len(DOCUMENT) - shared * BLOCK_TOKENS
    expected = Situation.OTHER_NODE if shared * BLOCK_TOKENS > rest else Situation.COLD
    assert met is expected


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    seen = Sightings()
    block = DOCUMENT[:BLOCK_TOKENS]
    seen.situation(block, 0)
    assert seen.situation(block, 0) is Situation.COLD


class Recorder(Engine):
    """Notes what it is sent, and when; no server is there."""

    def __init__(self, name: str, clock: Clock, log: list[tuple[str, float, tuple[int, ...]]]):
        self.name = name
        self._clock = clock
        self._log = log

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        self._log.append((self.name, self._clock.now, tuple(prompt)))
        return Answer((7,) * max_tokens, 0.0, 0.0, 0)

    def counters(self) -> Counters:
        return Counters()


def test_each_prompt_goes_to_both_servers_in_turn_with_a_rest_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, "lab.demo.replay")
    log: list[tuple[str, float, tuple[int, ...]]] = []
    began = clock.now
    nodes = [Recorder(name, clock, log) for name in ("A", "B")]
    comparisons = replay(documents(4), nodes, Recorder("plain", clock, log), lambda: None)
    assert len(comparisons) == 12
    pairs = [log[i : i + 2] for i in range(0, len(log), 2)]
    assert [pair[0][2] for pair in pairs] == [pair[1][2] for pair in pairs]
    assert [each.exchange.prompt for each in comparisons] == [pair[0][2] for pair in pairs]
    # No server is always the first of two, nor always the second, and so it is with each node.
    for name in "AB":
        own = [pair for pair in pairs if name in (pair[0][0], pair[1][0])]
        assert sum(pair[0][0] == name for pair in own) == len(own) / 2
        assert all("plain" in (pair[0][0], pair[1][0]) for pair in own)
    moments = [began, *(moment for _, moment, _ in log)]
    pauses = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert min(pauses) >= REST_SECONDS - 1e-6


def test_no_measured_request_is_the_first_of_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = Clock(monkeypatch), list[tuple[str, float, tuple[int, ...]]]()
    nodes = [Recorder(name, clock, log) for name in ("A", "B")]
    warm_up(nodes, Recorder("plain", clock, log), 2_000)
    assert {name for name, _, _ in log} == {"A", "B", "plain"}
    assert all(len(prompt) == 2_000 for _, _, prompt in log)
    # Each computes one that no other server has put into the pool, then loads another node's.
    first, later = log[:3], log[3:]
    assert len({prompt[:BLOCK_TOKENS] for _, _, prompt in first}) == 3
    assert {name: prompt for name, _, prompt in later} == {
        "A": first[1][2],
        "B": first[0][2],
    }
