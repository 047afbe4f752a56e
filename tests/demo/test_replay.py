"""What a prompt meets is worked out from what the nodes were sent before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.demo.replay import BLOCK_TOKENS, Sightings, Situation

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
