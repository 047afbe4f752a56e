"""What the simulator expects of the demo's requests, against counting it by hand."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lab.demo.engine import Counters
from lab.demo.figures import Hits
from lab.demo.forecast import hits_of, requests_text
from lab.demo.replay import BLOCK_TOKENS, Exchange, Situation, chain
from penstock.completions import Answer


def exchange(
    prompt: tuple[int, ...], *, cached: int = 0, loaded: int = 0, declined: int = 0, late: int = 0
) -> Exchange:
    answer = Answer((1, 2), 0.1, 0.2, cached)
    moved = Counters(loaded_tokens=loaded, declined_tokens=declined, late_blocks=late)
    return Exchange(0, 0, 0, Situation.COLD, prompt, answer, moved)


def prompt(*blocks: int, rest: int = 3) -> tuple[int, ...]:
    return tuple(n for block in blocks for n in (block,) * BLOCK_TOKENS) + (99,) * rest


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12))
def test_every_block_is_found_that_any_node_has_seen(requests: list[list[int]]) -> None:
    exchanges = [exchange(prompt(*blocks)) for blocks in requests]
    seen: set[bytes] = set()
    found = total = 0
    for each in exchanges:
        names = chain(each.prompt)
        found += next((n for n, name in enumerate(names) if name not in seen), len(names))
        total += len(names)
        seen.update(names)
    assert hits_of(exchanges).expected == found / max(1, total)


def test_what_was_found_declined_and_late_is_counted_in_blocks() -> None:
    exchanges = [
        exchange(prompt(1, 2, 3, 4)),
        exchange(prompt(1, 2, 3, 5), cached=3 * BLOCK_TOKENS, loaded=2 * BLOCK_TOKENS),
        exchange(prompt(1, 2, 3, 4), declined=3 * BLOCK_TOKENS, late=1),
    ]
    assert hits_of(exchanges) == Hits(found=3 / 12, declined=3 / 12, late=1 / 12, expected=7 / 12)


def test_requests_are_saved_in_mooncakes_format(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(requests_text([exchange(prompt(1, 2)), exchange(prompt(1, 3), cached=128)]))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["hash_ids"] == [0, 1]
    assert second["hash_ids"] == [0, 2]
    assert first["input_length"] == 2 * BLOCK_TOKENS + 3
    assert second["timestamp"] > first["timestamp"]
